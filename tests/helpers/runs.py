"""Four small runs that many tests read: made when the first asks for one, once for all processes of a test session."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from trime.decoding.explanation import GeneratedToken
from trime.lab.runner import run
from trime.stages.graph import Graph
from trime.stages.preflight import build_graph

ALL_MEMORIES = "evaluate.memories=[local,long,external,ngram,ngram_document]"
RUNS = {
    "language": [
        *("experiment=trime_ext", ALL_MEMORIES, "evaluate.analysis=true", "evaluate.per_token=true", "logger=csv"),
        *("evaluate.sample=documents", "evaluate.tokens=2k", "report.samples.passages=1", "dataset.modules=40"),
    ],
    "stateful": ["experiment=trime_memorizing", "logger=wandb", "report.samples.passages=1"],
    "translation": ["experiment=trime_mt", "report.samples.passages=2"],
    "decoder": ["experiment=attendre_decoder", "model.query_size=0", "eviction=sink", "model.memory_size=24", "model.chunk=16"],
}


@dataclass(frozen=True)
class SharedRun:
    """A finished run. Its files must stay as they are: a test that changes some copies the folder."""

    name: str
    outputs: Path
    config: DictConfig

    @property
    def graph(self) -> Graph:
        """A new graph of the run."""
        config = self.config.copy()
        OmegaConf.set_readonly(config, False)
        return build_graph(config)

    @cached_property
    def folder(self) -> Path:
        """The folder of its results."""
        (file,) = self.outputs.glob("runs/*/*/results.json")
        return file.parent

    @cached_property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``."""
        return json.loads((self.folder / "results.json").read_text())

    @cached_property
    def printed(self) -> str:
        """All that the run wrote to standard output."""
        return (self.outputs / "printed.txt").read_text()

    def copy(self, outputs: Path) -> SharedRun:
        """Return a copy of the run that may be changed."""
        shutil.copytree(self.outputs, outputs)
        config = self.config.copy()
        OmegaConf.set_readonly(config, False)
        config.paths.outputs = str(outputs)
        return SharedRun(self.name, outputs, config)

    def command(self, *words: str) -> list[str]:
        """Return the words of a command line on this run, with other settings."""
        return [*RUNS[self.name], f"paths.outputs={self.outputs}", *words]


def shared_run(name: str, folder: Path, compose: Any) -> SharedRun:
    """Make a run below a folder unless another process did."""
    outputs = folder / f"{name}_run"
    with FileLock(folder / f"{name}.lock"):
        config = compose(*RUNS[name], f"paths.outputs={outputs}", pictures=True)
        if not (outputs / "printed.txt").exists():
            outputs.mkdir(exist_ok=True)
            with (outputs / "printed.partial").open("w") as printed, redirect_stdout(printed):
                run(config.copy())
            (outputs / "printed.partial").rename(outputs / "printed.txt")
    OmegaConf.set_readonly(config, True)
    return SharedRun(name, outputs, config)


@pytest.fixture(scope="session")
def language(session_folder: Path, tiny: Any) -> SharedRun:
    """A language model with every memory, on a grid and in a fitted mixture, with its analysis and all pictures."""
    return shared_run("language", session_folder, tiny)


@pytest.fixture(scope="session")
def stateful(session_folder: Path, tiny: Any) -> SharedRun:
    """A Memorizing Transformer, logged to W&B."""
    return shared_run("stateful", session_folder, tiny)


@pytest.fixture(scope="session")
def translation(session_folder: Path, tiny: Any) -> SharedRun:
    """A translation with a datastore."""
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    return shared_run("translation", session_folder, tiny)


@pytest.fixture(scope="session")
def decoder(session_folder: Path, tiny: Any) -> SharedRun:
    """A small decoder that is trained and answers questions with an evicting memory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return shared_run("decoder", session_folder, tiny)


@pytest.fixture(params=RUNS)
def shared(request: pytest.FixtureRequest) -> SharedRun:
    """Each of the four runs."""
    return request.getfixturevalue(request.param)


def without_places(tokens: list[GeneratedToken]) -> list[GeneratedToken]:
    """Return tokens whose entries do not say where they are from, which depends on the files that are there."""
    return [token._replace(entries=[entry | {"place": None} for entry in token.entries]) for token in tokens]
