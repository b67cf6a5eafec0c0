"""Shared means: configurations composed as the command line composes them, one place for tiny artefacts."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("TRIME_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported first


@cache
def composed_once(overrides: tuple[str, ...], return_hydra: bool) -> DictConfig:
    """The configuration of a command line, composed once a process; it is not to be changed."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=return_hydra)


def composed(*overrides: str, return_hydra: bool = False) -> DictConfig:
    """The configuration of a command line, the caller's own."""
    return copy.deepcopy(composed_once(overrides, return_hydra))


@cache
def experiment(name: str) -> DictConfig:
    """The configuration of an experiment as it stands; it cannot be changed."""
    config = composed(f"experiment={name}")
    OmegaConf.set_readonly(config, True)
    return config


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """How PyTorch multiplies is a process's: runs choose it, tests begin with what it was."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


class Screen(logging.StreamHandler[TextIO]):
    """Writes messages to the standard output of the moment, which pytest may have replaced."""

    @property  # type: ignore[override]
    def stream(self) -> TextIO:
        """The standard output."""
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream that StreamHandler sets."""


@pytest.fixture(autouse=True)
def messages() -> None:
    """Messages of the package go to standard output, as on the command line; a test of the command line may have changed it."""
    logger = logging.getLogger("trime")
    logger.setLevel(logging.INFO)
    logger.handlers = [Screen()]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests run in random order (pytest-randomly); each begins with the same random state of torch."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's artefacts lie, so that tests share what they have in common."""
    return tmp_path_factory.mktemp("trime")


@pytest.fixture(scope="session")
def tiny(place: Path) -> Callable[..., DictConfig]:
    """Composes an experiment at size=tiny, two updates long, under the session's place."""

    def make(*overrides: str, return_hydra: bool = False) -> DictConfig:
        fixed = [f"paths.data={place}/data", f"paths.outputs={place}/outputs", "logger=none", "report.samples.passages=0"]
        return composed(
            "size=tiny", "train.updates=2", "trainer.enable_progress_bar=false", *fixed, *overrides, return_hydra=return_hydra
        )

    return make


@pytest.fixture()
def text_folder(tmp_path: Path) -> Path:
    """A folder of text with train/ valid/ test/, some kilobytes in all."""
    text = "the cat sat on a mat and the dog ran to the house while it rained in May ."
    words = re.findall(r"\S+", text)
    for number, split in enumerate(("train", "valid", "test")):
        (tmp_path / "text" / split).mkdir(parents=True)
        for document in range(3):
            order = [words[(i * (7 + document + number) + i // 5) % len(words)] for i in range(600)]
            lines = [" ".join(order[i : i + 12]) for i in range(0, len(order), 12)]
            for suffix in ("txt", "py"):
                (tmp_path / "text" / split / f"{document}.{suffix}").write_text("\n".join(lines) + "\n")
    return tmp_path / "text"
