"""A user's mistake is one line that says how to mend it, exit status 1, no traceback, nothing lost."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hydra.errors import ConfigCompositionException, HydraException
from safetensors import SafetensorError

from tests.conftest import NO_PICTURES, Tiny
from tests.helpers.runs import SharedRun
from trime.errors import UserError
from trime.lab import command_line
from trime.lab.command_line import check_text_exists, format_error, message_of
from trime.lab.runner import run
from trime.stages import encode
from trime.stages.graph import Graph
from trime.stages.index import check_index, check_index_factory


class Said:
    """Runs the command line in this process and reads what it said.

    Hydra composes a command twice, the first time to learn whether it sweeps; none of these does, so that is left out.
    """

    def __init__(self, session_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.session_folder, self.capsys, self.monkeypatch = session_folder, capsys, monkeypatch
        monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)

    def __call__(self, *overrides: str, where: Path | None = None) -> str:
        fixed = ["size=tiny", "logger=none", "train.updates=2", "trainer.enable_progress_bar=false"]
        places = [f"paths.{name}={where or self.session_folder}/{name}" for name in ("data", "outputs")]
        self.monkeypatch.setattr("sys.argv", ["cli.py", *fixed, *places, *overrides])
        self.capsys.readouterr()
        assert command_line.main() == 1, "exit status"
        err = self.capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in err, err
        return lines[0]


@pytest.fixture()
def said(session_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(session_folder, capsys, monkeypatch)


# Commands that are refused before anything is made, and what the line must name.
REFUSED = """
experiment=trime train.update=3 -> there is no setting train.update: is it train.updates?
experiment=trime no.such=3 -> there is no setting no.such
experiment=knn_lm index.k=100000 -> lower index.k
experiment=knn_lm index.factory=IVF4096_SQ8 -> index=exact
experiment=knn_lm index.factory=Nonsense99 -> factory string
experiment=trime memory.metric=l2 -> similarity alone
experiment=trime_ext index.metric=l2 -> set similarity alone
experiment=cache model.gate=true -> memory in training
experiment=trime name=../up -> name=
experiment=trime report.name=a/b -> report.name
experiment=trime dictionary=dict.txt -> checkpoint=FILE
experiment=trime memory.drop_local=0.5 -> drop_local
experiment=trime_long batching.run=9 -> in 1..batching.size
experiment=trime_ext memory.drop_local=2 -> [0, 1]
experiment=trime model.backbone.heads=3 -> model.backbone.heads
experiment=trime stages=[fit,cook] -> there is no stage
experiment=trime evaluate.rows=[{joint:[shortterm]}] -> evaluate.rows
experiment=trime evaluate.rows=[local] -> evaluate.rows
experiment=trime vocabulary.min_count=100000000 -> no symbol occurs
experiment=trime memory=drawn memory.shares={local:2.0,long:0.0,others:0.0,all:0.0} -> at most 1 together
experiment=trime evaluate.memories=[local,local] -> twice
experiment=trime mixture.model=null -> mixture.model
experiment=trime mixture.model.history=[2] -> history=2
experiment=trime compatibility=published mixture=none -> vocabulary.fairseq=true
experiment=trime compatibility=published mixture.model.history=[0.5] -> in its order
experiment=trime segments.length=500 -> model.backbone.positions=128
experiment=trime evaluate.context=500 -> evaluate.context
experiment=trime stages=[train_small] -> answers questions
experiment=trime dataset=phrases -> parallel text
experiment=trime report.runs=nowhere stages=[fit,report] -> set stages=[report]
experiment=trime stages=[generate] prompt_file=/nowhere/at/all -> prompt_file=/nowhere
experiment=trime stages=[generate] prompt_file=README.md generate.top_p=0 -> generate.top_p=0
experiment=trime stages=[generate] prompt_file=README.md seed=77 -> add
experiment=trime_long tune.memory_size=[4,64] eviction=sink -> eviction.sinks=4
experiment=trime_ext index.replicas=2 -> set index.engine=ray
experiment=srupp_trime_long batching=shuffled -> batching=streams
experiment=memorizing model.memory_size=4 eviction=sink -> eviction.sinks=4
experiment=memorizing model.memory_size=[4,8] -> model.memory_size
experiment=memorizing batching=shuffled -> batching=streams
experiment=memorizing evaluate.context=32 -> evaluate.context=0
experiment=memorizing model.backbone.memory.top_k=5000 -> top_k=5000
experiment=memorizing model.backbone.memory_layers=[7] -> memory_layers
experiment=memorizing eviction=lfu eviction.count=often -> count='often'
experiment=memorizing train.memory_size=0 -> train.memory_size=0
experiment=memorizing batching.size=40000 -> batching.size
experiment=memorizing model.backbone.memory.search=approximate eviction=lra_sum -> eviction=fifo
experiment=memorizing model.backbone.attention.norm=batch -> attention.norm=batch
experiment=memorizing model.backbone.window.length=0 -> window.length=0
experiment=knn_lm datastore.context=5000 -> datastore.block + datastore.context=
experiment=knn_lm datastore.block=0 -> datastore.block=0
experiment=knn_lm backbone=transformer_xl batching=streams evaluate.context=0 datastore.context=8 -> datastore.context=null
experiment=knn_mt model=small -> model=translation
experiment=knn_mt dataset=stdlib_tiny -> dataset=phrases
experiment=knn_mt task=translate -> task=translate
experiment=knn_mt translation.key=h -> key=h
experiment=knn_mt dataset=parallel -> dataset.path
experiment=knn_mt batching.tokens=0 -> batching.tokens=0
experiment=knn_mt stages=[audit] -> audit
experiment=knn_mt head=adaptive -> model.cutoffs
experiment=knn_mt batching=shuffled -> batching=budget
experiment=knn_mt evaluate.analysis=true -> evaluate.analysis
experiment=knn_mt dataset@evaluate.dataset=stdlib_tiny -> evaluate.dataset
experiment=knn_mt evaluate.rows=[{joint:[external]},{joint:[]}] -> evaluate.rows
experiment=knn_mt translation.k=[99999999] -> translation.k
experiment=knn_mt translation.min_length=-1 -> translation.min_length=-1
experiment=knn_mt translation.max_length=[0,0] -> translation.max_length
experiment=knn_mt model.backbone.positions=8 -> positions=8
experiment=trime_mt neighbours.analyzer=english -> neighbours.analyzer=english
experiment=vanilla model=pretrained model.name=null -> model.name=DIR_OR_NAME
experiment=vanilla model=pretrained model.name=/nowhere -> model.name=/nowhere
experiment=attendre_decoder model.memory_size=[24,24,24] model.chunk=16 -> 2 layers
experiment=attendre_decoder model.end=never -> model.end=never
experiment=attendre_decoder model.prefill=half -> model.prefill
experiment=attendre_decoder model.memory_size=24 model.chunk=16 model.prefill=guided model.query_size=0 -> answering.order=last
experiment=attendre_decoder model.position=far -> position=far
experiment=attendre_decoder small.model.kind=both -> kind=both
experiment=attendre_decoder small.questions.words=900 -> small.model.max_positions
experiment=attendre_decoder answering.split=dev -> answering.split=dev
experiment=vanilla +trainer.extra.limit_valid_batches=2 -> is it trainer.extra.limit_val_batches
experiment=vanilla +trainer.extra.max_steps=3 -> train.updates
experiment=vanilla +trainer.extra.limit_val_batches=many -> trainer.extra.limit_val_batches=many
experiment=vanilla +callbacks.lr=3 -> callbacks.lr=3
experiment=vanilla +callbacks.lr={_target_:nowhere.Lr} -> callbacks.lr._target_=nowhere.Lr
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_mistake_is_one_line_that_names_its_setting(line: str, tiny: Tiny) -> None:
    command, _, named = line.rpartition(" -> ")
    with pytest.raises((UserError, HydraException)) as raised:
        run(tiny(*command.split()))
    of_override = isinstance(raised.value, ConfigCompositionException)
    message = message_of(raised.value) if of_override else format_error(raised.value)
    assert named in message and "\n" not in message


def test_mistakes_in_a_text_are_told_before_training(said: Said, text_folder: Path, tmp_path: Path) -> None:
    own = ("experiment=knn_lm", "dataset=folder_words", f"dataset.path={text_folder}")
    assert "dataset.path" in said("dataset=folder_words", f"dataset.path={tmp_path}/nowhere", where=tmp_path)
    assert "wiki.train.tokens" in said("dataset=wikitext103", f"dataset.path={tmp_path}", where=tmp_path)
    assert "segments.length" in said(*own, "segments.length=5000", "model.backbone.positions=5000", where=tmp_path)
    for wrong, told in (("index.factory=IVF999_SQ8", "fewer cells"), ("index.k=9999999", "lower index.k")):
        assert told in said(*own, wrong, where=tmp_path)
    (text_folder / "test" / "1.txt").write_text("one " * 400)
    assert "evaluate.lines=false" in said(*own, "evaluate.lines=true", "vocabulary.min_count=1", where=tmp_path)
    shutil.rmtree(text_folder / "test")
    assert "no split 'test'" in said(*own, where=tmp_path)
    assert not list((tmp_path / "outputs" / "artefacts").glob("fit-*")), "no model was trained"


def test_a_text_that_is_not_there_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is imported that trains; what a sweep, another setting or a URL decides is left to the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novels").mkdir()
    for path in ("novels", "'novels'", "a,b", "s3://a/b", "null"):
        check_text_exists(["experiment=trime", f"dataset.path={path}"])
    for key in ("dataset.path", "evaluate.dataset.path", "datastore.dataset.path"):
        with pytest.raises(UserError, match=f"^{key}=nowhere: there is no file or folder of that name$"):
            check_text_exists([f"{key}=nowhere"])


def test_artefacts_of_another_model_are_refused(said: Said, language: SharedRun, text_folder: Path) -> None:
    graph = language.graph
    model, store = graph.model.path(), graph.store_of(graph.config).path()
    assert "another vocabulary" in said(f"checkpoint={model}", "dataset=folder_words", f"dataset.path={text_folder}")
    assert "holds no model" in said(f"checkpoint={text_folder}")
    assert "another model" in said("experiment=trime_ext", f"datastore.path={store}")
    assert "not a datastore" in said("experiment=knn_lm", f"datastore.path={graph.tune.path()}")
    assert "for scoring" in said("experiment=knn_lm", f"datastore.path={graph.valid.path()}")


def test_released_checkpoint(said: Said, tmp_path: Path) -> None:
    file, dictionary = tmp_path / "model.pt", tmp_path / "dict.txt"
    assert "does not exist" in said(f"checkpoint={file}")
    file.write_text("no checkpoint\n")
    assert "dictionary=dict.txt" in said(f"checkpoint={file}")
    assert "not a fairseq dictionary" in said(f"checkpoint={file}", f"dictionary={dictionary}")
    dictionary.write_text("word 3\n")
    assert "no PyTorch checkpoint" in said(f"checkpoint={file}", f"dictionary={dictionary}", "stages=[import]")
    torch.save({"model": {}, "args": print}, file)
    assert "not opened" in said(f"checkpoint={file}", f"dictionary={dictionary}", "stages=[import]")


def test_the_advice_about_a_truncated_artefact_mends_it(language: SharedRun, tmp_path: Path) -> None:
    """scripts/torture damages every file in many ways."""
    config = language.copy(tmp_path / "outputs").config
    config.stages = ["tune", "evaluate"]
    artefact = Graph(config).tune
    file = artefact.path() / "mixture.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match=f"delete {artefact.folder}"):
        run(config)
    shutil.rmtree(artefact.folder)
    run(config)
    assert (artefact.path() / "mixture.safetensors").is_file()


def test_what_this_machine_lacks(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device; FAISS, before training, but for ``index=auto``, which searches small stores without it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for wrong in ("index.device=cuda", "trainer.accelerator=gpu"):
        with pytest.raises(UserError, match="CUDA device"):
            run(tiny("experiment=knn_lm", wrong))
    monkeypatch.setattr("trime.stages.index.find_spec", lambda name: None)
    for options in (["datastore.tokens=null"], ["index=exact"], ["index=ivf", "stages=[prepare,fit]"]):
        check_index_factory(tiny("experiment=knn_lm", *options))
    with pytest.raises(UserError, match="faiss-cpu"):
        run(tiny("experiment=knn_lm", "index=ivf"))
    index = tiny("experiment=knn_lm").index
    assert check_index(index, 2**17, 64) is None
    with pytest.raises(UserError, match="index=exact"):
        check_index(index, 2**17 + 1, 64)


def test_words_that_are_no_settings(said: Said) -> None:
    """Hydra would answer with its own help, or with its grammar."""
    told = said("experiment=trime", "seed=1,2")
    assert "seed=1,2 has several values: add -m for a run with each, or write seed=[1,2]" in told
    several = said("experiment=trime,vanilla")
    assert "add -m for a run with each" in several and "[trime" not in several
    assert "there is no experiment/trim: is it experiment=trime?" in said("experiment=trim")
    assert "settings are written KEY=VALUE" in said("trime_ext") and "is it experiment=trime_ext?" in said("trime_ext")
    assert "a value with a space is quoted" in said("experiment=trime", "dataset.path=/a/folder", "of")
    for path in ("/a/ü", "/a#b", "it's", "/[a", 'a"b(', '"/a#', "C:\\x#\\"):
        message = said("report.figures.picture=null", f"dataset.path={path}")
        (quoted,) = shlex.split(message.partition("is quoted, ")[2].partition(" (python")[0])
        assert "cannot be read" not in said("report.figures.picture=null", "experiment=unknown", quoted)
    assert "its brackets do not match" in said("dataset.suffix=[.md,.txt")


def test_an_unwritable_place(said: Said, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for key in ("paths.outputs", "paths.data"):
        assert "paths.outputs, paths.data" in said("experiment=vanilla", f"{key}={tmp_path}/file")
    assert "is a file" in said("stages=[report]", f"report.runs={tmp_path}", f"report.keep={tmp_path}/file")


def test_a_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``head`` does; a broken pipe of another kind keeps its traceback."""
    monkeypatch.setattr("sys.argv", ["cli.py", "stages=[report]"])
    monkeypatch.setattr(command_line, "run_jobs", Mock(side_effect=BrokenPipeError))
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


@pytest.mark.parametrize("error", [FULL[0], *(pytest.param(error, marks=pytest.mark.slow) for error in FULL[1:])])
def test_full_disk(error: Exception, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(encode, "write_tensors", Mock(side_effect=error))
        assert "disk is full" in said("experiment=vanilla", "seed=5", "dataset.modules=20", where=tmp_path)
    assert list((tmp_path / "outputs" / "artefacts").glob("fit-*/model.safetensors")), "the model is kept"


def test_no_network(said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=urllib.error.URLError("no route to host")))
    message = said("dataset=wikitext103", where=tmp_path)
    assert "wikitext-103-v1.zip" in message and str(tmp_path) in message and ("md5" in message or "sha256" in message)


def test_no_runs_and_a_truncated_result(said: Said, tmp_path: Path) -> None:
    assert "report.runs" in said("stages=[report]", f"report.runs={tmp_path}/none")
    (tmp_path / "results.json").write_text("{")
    assert "truncated" in said("stages=[report]", f"report.runs={tmp_path}")


@pytest.mark.slow
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
        assert said.err.count("error: ") == failures and len(re.findall(r"^\w+, seed 0: test", said.out, re.M)) == finished
