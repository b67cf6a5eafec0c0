"""A user's mistake is one line that says how to mend it, exit status 1, no traceback, nothing lost."""

from __future__ import annotations

import errno
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig
from safetensors import SafetensorError

from tests.conftest import NO_PICTURES
from trime.errors import UserError
from trime.lab import command_line
from trime.lab.command_line import format_error, message_of
from trime.lab.runner import run
from trime.lab.sweep import JobResult
from trime.stages import encode
from trime.stages.datastore import check_index, check_index_factory
from trime.stages.graph import Graph


class Said:
    """Runs the command line in this process and reads what it said.

    Hydra composes a command twice, the first time to learn whether it sweeps; none of these does, so that is left out.
    """

    def __init__(self, session_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.session_folder, self.capsys, self.monkeypatch = session_folder, capsys, monkeypatch
        monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)

    def __call__(self, *overrides: str, where: Path | None = None) -> str:
        fixed = [
            "size=tiny",
            "logger=none",
            "train.updates=2",
            "trainer.enable_progress_bar=false",
            f"paths.data={where or self.session_folder}/data",
            f"paths.outputs={where or self.session_folder}/outputs",
        ]
        self.monkeypatch.setattr("sys.argv", ["cli.py", *fixed, *overrides])
        self.capsys.readouterr()
        assert command_line.main() == 1, "exit status"
        err = self.capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in err, err
        return lines[0]


@pytest.fixture()
def said(session_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(session_folder, capsys, monkeypatch)


@pytest.fixture()
def refused(tiny: Callable[..., DictConfig]) -> Callable[..., str]:
    """Return a function that runs an experiment and returns the line that the command line would print of its error.

    Commands that choose the same files share what Hydra composes, so that a wrong value costs what its run costs.
    """

    def line(*overrides: str) -> str:
        with pytest.raises((UserError, HydraException)) as raised:
            run(tiny(*overrides))
        of_override = isinstance(raised.value, ConfigCompositionException)
        return message_of(raised.value, [*overrides]) if of_override else format_error(raised.value)

    return line


def test_missing_folder_and_path(said: Said, tmp_path: Path) -> None:
    assert "dataset.path" in said("dataset=folder", f"dataset.path={tmp_path}/nowhere")
    assert "dataset.path=DIR" in said("dataset=folder")
    assert "enwik8" in said("dataset=enwik8", f"dataset.path={tmp_path}/nowhere")
    assert "wiki.train.tokens" in said("dataset=wikitext103", f"dataset.path={tmp_path}")


def test_empty_file_and_empty_split(said: Said, text_folder: Path) -> None:
    for file in (text_folder / "valid").iterdir():
        file.write_text("")
    assert "'valid'" in said("dataset=folder", f"dataset.path={text_folder}")
    shutil.rmtree(text_folder / "train")
    assert "training split" in said("dataset=folder", f"dataset.path={text_folder}")
    for folder in ("valid", "test"):
        shutil.rmtree(text_folder / folder)
    assert "3" in said("dataset=folder", f"dataset.path={text_folder}")


def test_corpus_shorter_than_a_segment(said: Said, text_folder: Path) -> None:
    message = said("dataset=folder", f"dataset.path={text_folder}", "segments.length=5000", "model.backbone.positions=5000")
    assert "segments.length" in message


def test_a_line_longer_than_the_models_positions_is_said_before_training(said: Said, text_folder: Path, tmp_path: Path) -> None:
    (text_folder / "test" / "1.txt").write_text("one " * 400)
    options = ("dataset=folder", f"dataset.path={text_folder}", "evaluate.lines=true", "vocabulary.min_count=1")
    assert "evaluate.lines=false" in said(*options, where=tmp_path)
    assert not list((tmp_path / "outputs" / "artefacts").glob("fit-*"))


def test_neighbours_that_are_all_excluded(said: Said, text_folder: Path) -> None:
    for file in (text_folder / "train").iterdir():
        if file.name != "0.txt":
            file.unlink()
    given = "experiment=trime_ext", "dataset=folder", f"dataset.path={text_folder}", "segments.length=16"
    assert "leaves none of" in said(*given, "neighbours.exclude=document")


def test_segment_longer_than_the_models_positions(said: Said) -> None:
    assert "model.backbone.positions=128" in said("segments.length=500")
    assert "evaluate.context" in said("evaluate.context=500")


def test_checkpoint_of_another_vocabulary_or_none(said: Said, tiny: Callable[..., DictConfig], text_folder: Path) -> None:
    config = tiny("experiment=vanilla")
    run(config)
    model = Graph(config).model.path()
    other = ["dataset=folder", f"dataset.path={text_folder}"]
    assert "another vocabulary" in said(f"checkpoint={model}", *other)
    assert "holds no model" in said(f"checkpoint={text_folder}")


def test_released_checkpoint(said: Said, tmp_path: Path) -> None:
    file, dictionary = tmp_path / "model.pt", tmp_path / "dict.txt"
    assert "does not exist" in said(f"checkpoint={file}")
    file.write_text("no checkpoint\n")
    assert "dictionary=dict.txt" in said(f"checkpoint={file}")
    assert "not a fairseq dictionary" in said(f"checkpoint={file}", f"dictionary={dictionary}")
    dictionary.write_text("word many\n")
    assert "not a fairseq dictionary" in said(f"checkpoint={file}", f"dictionary={dictionary}")
    dictionary.write_text("word 3\n")
    assert "no PyTorch checkpoint" in said(f"checkpoint={file}", f"dictionary={dictionary}", "stages=[import]")
    torch.save({"model": {}, "args": print}, file)
    assert "not opened" in said(f"checkpoint={file}", f"dictionary={dictionary}", "stages=[import]")


def test_datastore_of_another_model(said: Said, tiny: Callable[..., DictConfig]) -> None:
    config = tiny("experiment=knn_lm")
    run(config)
    store = Graph(config).store_of(config).path()
    assert "another model" in said("experiment=trime_ext", f"datastore.path={store}")
    assert "not a datastore" in said("experiment=knn_lm", f"datastore.path={Graph(config).tune.path()}")
    assert "for scoring" in said("experiment=knn_lm", f"datastore.path={Graph(config).valid.path()}")


@pytest.mark.parametrize("kind", ["prepare", "fit", "encode", "datastore", "tune", "evaluate"])
def test_truncated_artefact(kind: str, said: Said, tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    places = [f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    config = tiny("experiment=knn_lm", "dataset.modules=30", *places)
    run(config)
    graph = Graph(config)
    artefact = {
        "prepare": graph.corpus,
        "fit": graph.model,
        "encode": graph.valid,
        "datastore": graph.memories.datastores[0].index,
        "tune": graph.tune,
        "evaluate": graph.evaluate,
    }[kind]
    assert artefact is not None
    file = max((f for f in artefact.path().iterdir() if f.name != "manifest.json"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-7])
    message = said("experiment=knn_lm", "dataset.modules=30", where=tmp_path)
    assert str(artefact.folder) in message and "delete" in message
    shutil.rmtree(artefact.folder)
    assert run(config) is not None, "the advice mends it"


# Settings that do not fit one another, the text or this machine, and what the message names; test_schema.py has the others.
IMPOSSIBLE = [
    ("experiment=knn_lm index.k=100000", "lower index.k"),
    ("experiment=knn_lm index.factory=IVF4096_SQ8", "index=exact"),
    ("experiment=knn_lm index.factory=Nonsense99", "factory string"),
    ("experiment=trime memory.metric=l2", "similarity alone"),
    ("experiment=trime_ext index.metric=l2", "set similarity alone"),
    ("experiment=cache model.gate=true", "memory in training"),
    ("name=../up", "name="),
    ("report.name=a/b", "report.name"),
    ("dictionary=dict.txt", "checkpoint=FILE"),
    ("experiment=trime memory.drop_local=0.5", "drop_local"),
    ("experiment=trime_long batching.run=9", "in 1..batching.size"),
    ("experiment=trime_ext memory.drop_local=2", "[0, 1]"),
    ("model.backbone.heads=3", "model.backbone.heads"),
    ("stages=[fit,cook]", "there is no stage"),
    ("evaluate.rows=[{joint:[shortterm]}]", "evaluate.rows"),
    ("evaluate.rows=[local]", "evaluate.rows"),
    ("vocabulary.min_count=100000000", "no symbol occurs"),
    ("memory=drawn memory.shares={local:2.0,long:0.0,others:0.0,all:0.0}", "at most 1 together"),
    ("experiment=trime evaluate.memories=[local,local]", "twice"),
    ("experiment=trime mixture.model=null", "mixture.model"),
    ("experiment=trime mixture.model.history=[2]", "mixture.model"),
    ("experiment=trime compatibility=published mixture=none", "vocabulary.fairseq=true"),
    ("experiment=trime compatibility=published mixture.model.history=[0.5]", "in its order"),
    ("experiment=knn_mt mixture.model.online=true", "mixture.model.online=false"),
    ("experiment=knn_mt model=small", "model=translation"),
    ("experiment=srupp_trime_long batching=shuffled", "batching=streams"),
    ("experiment=trime_long tune.memory_size=[4,64] eviction=sink", "eviction.sinks=4"),
    ("experiment=memorizing model.memory_size=4 eviction=sink", "eviction.sinks=4"),
    ("experiment=memorizing model.memory_size=[4,8]", "model.memory_size"),
    ("experiment=trime_ext index.replicas=2", "set index.engine=ray"),
    ("stages=[train_small]", "answers questions"),
    ("report.runs=nowhere frontier.gb=-1", "frontier.gb"),
]


@pytest.mark.parametrize(("command", "said"), IMPOSSIBLE)
def test_impossible_settings(command: str, said: str, refused: Callable[..., str]) -> None:
    message = refused(*command.split())
    assert said in message and "\n" not in message


def test_what_this_machine_lacks(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert all("CUDA device" in refused(wrong) for wrong in ("index.device=cuda", "trainer.accelerator=gpu"))


def test_an_unwritable_place(said: Said, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for key in ("paths.outputs", "paths.data"):
        assert "paths.outputs, paths.data" in said("experiment=vanilla", f"{key}={tmp_path}/file")
    assert "is a file" in said("stages=[report]", f"report.runs={tmp_path}", f"report.keep={tmp_path}/file")


def test_what_comes_after_training_is_checked_before(said: Said, text_folder: Path, tmp_path: Path) -> None:
    own = ("experiment=knn_lm", "dataset=folder", f"dataset.path={text_folder}")
    for wrong, told in (
        ("index.factory=IVF999_SQ8", "fewer cells"),
        ("index.factory=Nonsense9", "factory string"),
        ("index.factory=PCA99_SQ8", "PCA"),
        ("index.k=9999999", "lower index.k"),
        ("index.parts=9999999", "lower it"),
        ("datastore.split=dev", "train, valid or test"),
    ):
        assert told in said(*own, wrong, where=tmp_path)
    shutil.rmtree(text_folder / "test")
    assert "no split 'test'" in said(*own, where=tmp_path)
    assert not list((tmp_path / "outputs" / "artefacts").glob("fit-*")), "no model was trained"


def test_what_needs_faiss_says_so(
    refused: Callable[..., str], tiny: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, but for ``index=auto``, which searches small stores without it."""
    monkeypatch.setattr("trime.stages.datastore.find_spec", lambda name: None)
    for options in (["datastore.tokens=null"], ["index=exact"], ["index=ivf", "stages=[prepare,fit]"]):
        check_index_factory(tiny("experiment=knn_lm", *options))
    assert "faiss-cpu" in refused("experiment=knn_lm", "index=ivf")
    index = tiny("experiment=knn_lm").index
    assert check_index(index, 2**17, 64) is None
    with pytest.raises(UserError, match="index=exact"):
        check_index(index, 2**17 + 1, 64)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_copy_that_does_not_fit_names_its_target(number: int) -> None:
    error = OSError(number, "no space", "source", None, "target")
    assert format_error(error).startswith("the disk is full (target)")


def test_a_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., DictConfig]) -> None:
    """As ``head`` does; a broken pipe of another kind keeps its traceback."""

    def broken() -> list[JobResult]:
        raise BrokenPipeError

    monkeypatch.setattr("sys.argv", ["cli.py", "stages=[report]"])
    monkeypatch.setattr(command_line, "run_jobs", broken)
    reader, writer = os.pipe()
    with pytest.raises(BrokenPipeError):
        command_line.main()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        print("the rest of the list")
        assert command_line.main() == 141


FULL = [
    OSError(errno.ENOSPC, "No space left on device", "shard"),
    OSError("1000 requested and 12 written"),  # NumPy
    RuntimeError("Error in virtual void faiss: write error in x.index: 1 != 2 (No space left on device)"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_full_disk(error: Exception, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(encode, "write_tensors", full)
        assert "disk is full" in said("experiment=vanilla", "seed=5", "dataset.modules=20", where=tmp_path)
    assert list((tmp_path / "outputs" / "artefacts").glob("fit-*/model.safetensors")), "the model is kept"


def test_no_network(said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    for dataset, file in (("wikitext103", "wikitext-103-v1.zip"), ("enwik8", "enwik8.zip")):
        message = said(f"dataset={dataset}", where=tmp_path)
        assert file in message and str(tmp_path) in message and ("md5" in message or "sha256" in message)


def test_no_runs_and_a_truncated_result(said: Said, tmp_path: Path) -> None:
    assert "report.runs" in said("stages=[report]", f"report.runs={tmp_path}/none")
    for wrong in ("{", "[]", '{"a": 1}'):
        (tmp_path / "results.json").write_text(wrong)
        assert "truncated" in said("stages=[report]", f"report.runs={tmp_path}")
    assert "report.runs" in said("stages=[report]", "report.runs=5")
    assert "set stages=[report]" in said("stages=[fit,report]", f"report.runs={tmp_path}")
    assert "set stages=[report]" in said("stages=[ledger]", f"report.runs={tmp_path}")
    assert "a list" in said("stages=report")


def test_a_sweep_goes_on_after_a_failed_run(
    session_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of one process share nothing: a second sweep reports its own runs and its own failures alone."""
    places = [f"paths.data={session_folder}/data", f"paths.outputs={tmp_path}/outputs"]
    fixed = ["size=tiny", "logger=none", "train.updates=2", "trainer.enable_progress_bar=false", *places, *NO_PICTURES]
    for experiments, failures, finished in (("trime_ext,trime", 2, 2), ("trime", 1, 1)):
        monkeypatch.setattr("sys.argv", ["cli.py", "-m", *fixed, f"experiment={experiments}", "memory.drop_local=2,0"])
        assert command_line.main() == 1
        said = capsys.readouterr()
        assert said.err.count("error: ") == failures and said.out.count("results: ") == finished
