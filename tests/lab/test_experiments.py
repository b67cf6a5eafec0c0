"""Every experiment composes, trains two updates and reports at size=tiny; every choice of every group instantiates."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from tests.conftest import EVERY, ROOT, Tiny, composed, experiment
from tests.helpers.decoders import save_decoder
from trime.common.io import partial_of, plain
from trime.config.check import check_components, validate
from trime.config.rows import all_rows
from trime.config.schema import LANGUAGE_MODEL
from trime.errors import UserError
from trime.lab.runner import run
from trime.models.network import build_network
from trime.scoring.rows import rows_of
from trime.stages import encode
from trime.stages.graph import Graph
from trime.stages.preflight import build_graph
from trime.token_memory.search import index as indices
from trime.translation.pairs.base import Parallel

CONF = ROOT / "conf"
OTHERS = {"mt_vanilla", "knn_mt", "trime_mt", "decoder_memory"}  # the last one needs a model
EXPERIMENTS = [name for name in EVERY if not name.startswith("attendre") and name not in OTHERS]  # of language models
FILES = sorted([*EVERY, *(row.experiment for row in all_rows() if row.name)])
ABLATIONS = [name for name in FILES if name.startswith("ablation/")]
TABLES = sorted(path.stem for path in (CONF / "table").glob("*.yaml"))
GROUPS = {
    path.name: sorted(choice.stem for choice in path.glob("*.yaml"))
    for path in sorted(CONF.iterdir())
    if path.is_dir() and path.name not in ("experiment", "rows", "size", "table", "hydra")
}


@pytest.mark.parametrize("choice", [*(f"experiment={name}" for name in FILES), *(f"table={name}" for name in TABLES)])
def test_every_experiment_is_understood(choice: str) -> None:
    """It composes, its parts take the arguments that it gives them, and its graph and its network are made; nothing runs."""
    name = choice.removeprefix("experiment=")
    config = composed(choice) if name == choice else experiment(name)
    validate(config)
    check_components(plain(config))
    assert build_graph(config).config.name == config.name
    of_text = plain(config.task) == LANGUAGE_MODEL
    if of_text and "pretrained" not in config.model.embedding._target_:
        assert rows_of(config) and config.evaluate.block + config.evaluate.context <= config.model.backbone.positions
        with torch.device("meta"):
            assert build_network(config.model, 5000).parameter_count > 0
    if name.count("/") == 2 and of_text:
        assert config.evaluate.tokens is None and config.train.keep == "best" and not config.evaluate.bounded


def swept(config: DictConfig) -> dict[str, list[str]]:
    """Return the values of each setting that a sweep goes over."""
    parser, params = OverridesParser.create(), {}
    for key, value in config.hydra.sweeper.params.items():
        asked = parser.parse_override(f"{key}={value}")
        params[key] = list(asked.sweep_string_iterator()) if asked.is_sweep_override() else [value]
    return params


@pytest.mark.slow
@pytest.mark.parametrize("choice", [*(f"experiment={name}" for name in ABLATIONS), *(f"table={name}" for name in TABLES)])
def test_a_sweep_has_runs_of_different_names_and_those_that_are_published(choice: str, tiny: Tiny) -> None:
    """Every value is valid. An ablation has a run for each; a table that sweeps over experiments has theirs."""
    config = tiny(choice, return_hydra=True)
    assert config.hydra.mode.name == "MULTIRUN"
    params, group = swept(config), choice.partition("=")[2].rpartition("/")[2]
    for key, values in params.items():
        for value in values:
            validate(tiny(choice, f"{key}={value}"))
    published = {
        row for rows in config.report.published.values() for row in rows if row.startswith((f"ablation_{group}_", f"{group}_"))
    }
    if published:
        settings = ([f"{key}={value}" for key, value in zip(params, own, strict=True)] for own in product(*params.values()))
        assert published <= {tiny(choice, *own).name for own in settings}


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_runs(name: str, tiny: Tiny) -> None:
    """With the second values of its settings."""
    params = swept(tiny(f"experiment={name}", return_hydra=True))
    second = [f"{key}={values[min(1, len(values) - 1)]}" for key, values in params.items()]
    assert run(tiny(f"experiment={name}", *second, "tune.memory_size=[64]")).loss is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("domain/")])
def test_a_row_of_the_domain_table(name: str, tiny: Tiny, text_folder: Path) -> None:
    """B is read in A's vocabulary; memory is from A, or from B's own split."""
    graph = Graph(tiny(f"experiment={name}", f"evaluate.dataset.path={text_folder}"))
    run(graph.config)
    results = json.loads((graph.run_folder / "results.json").read_text())
    assert results["evaluation_dataset"]["name"] == text_folder.name and results["dataset"]["name"] == "stdlib"
    assert graph.evaluated_corpus.corpus().vocabulary.fingerprint == graph.corpus.corpus().vocabulary.fingerprint
    if name[-2:] in ("_a", "_b"):
        assert results["datastore"]["dataset"] == {"_a": "stdlib", "_b": text_folder.name}[name[-2:]]
        assert results["datastore"]["split"] == "train"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name: str, tiny: Tiny) -> None:
    """To its report; tests/helpers/runs.py has the four that every test session runs."""
    config = tiny(f"experiment={name}")
    assert run(config).loss == last_loss(config) and Graph(config).run_folder.parent.name == name


@pytest.mark.slow
def test_a_decoder_with_every_memory_runs(tiny: Tiny, text_folder: Path, tmp_path: Path) -> None:
    config = tiny("experiment=decoder_memory", f"model.name={save_decoder(tmp_path)}", f"dataset.path={text_folder}")
    assert run(config).loss == last_loss(config)


def last_loss(config: DictConfig) -> float:
    """Return the loss of valid in a run's results."""
    return float(json.loads((Graph(config).run_folder / "results.json").read_text())["metrics"]["valid"][-1]["loss"])


def test_experiments_of_the_same_training_share_one_model() -> None:
    shared = ["vanilla", "cache_long", "knn_lm"], ["trime_ext", "trime_ext_no_long"]
    prints = [{Graph(composed(f"experiment={name}", "size=tiny")).model.fingerprint for name in names} for names in shared]
    assert [len(found) for found in prints] == [1, 1] and prints[0] != prints[1]
    assert Graph(composed("experiment=trime_ext", "size=tiny", "seed=1")).model.fingerprint not in prints[1]


@pytest.mark.parametrize("size", ["tiny", "small", "paper", "paper_150m", "paper_7m", "paper_enwik8"])  # of language models
@pytest.mark.parametrize("name", ["trime_all", "trime_memorizing", "srupp"])  # the experiments' sizes differ by these
def test_every_size_fits_every_backbone(size: str, name: str) -> None:
    config = composed(f"experiment={name}", f"size={size}")
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert rows_of(config) and config.segments.length <= config.model.backbone.positions
    assert config.evaluate.block + config.evaluate.context <= config.model.backbone.positions
    with torch.device("meta"):
        build_network(config.model, 5000)


@pytest.mark.parametrize("number", range(max(map(len, GROUPS.values()))))
def test_every_choice_of_every_group_is_understood(number: int, text_folder: Path) -> None:
    """One choice of each group at once, as far as it has so many; composing each by itself would take minutes."""
    chosen = {group: choices[number] for group, choices in GROUPS.items() if number < len(choices)}
    keys = {"test_memories": f"test_memories@test_memories.{chosen.get('test_memories')}"}
    config = composed(*(f"{keys.get(group, group)}={choice}" for group, choice in chosen.items()))
    for group in {"batching", "neighbours", "schedule"} & {*chosen}:
        assert instantiate(config[group], _convert_="all") is not None
    if chosen.get("memory", "none") != "none":
        assert instantiate(config.memory, _convert_="all").visibility
    if "optimizer" in chosen:
        instantiate(config.optimizer, _partial_=True)([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    if "path" in config.dataset and chosen["dataset"] not in ("enwik8", "wikitext2", "wikitext103"):
        config.dataset.path = str(text_folder)
        if isinstance(found := instantiate(config.dataset, _convert_="all"), Parallel):
            assert found.languages == ("de", "en") and found.location == text_folder
        else:
            assert list(found.documents("train"))


def test_stages_alone_ask_for_what_is_missing(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "experiment=trime", f"paths.outputs={tmp_path}", "mixture=none"
    run(tiny(*words, "stages=[prepare]"))
    with pytest.raises(UserError, match="add fit to stages="):
        run(tiny(*words, "stages=[encode]"))
    for stage in ("prepare", "fit", "encode", "tune", "evaluate", "report"):
        run(tiny(*words, f"stages=[{stage}]"))
    capsys.readouterr()
    run(tiny(*words))
    assert "made" not in capsys.readouterr().out


def test_other_text_is_evaluated_in_the_models_vocabulary(tiny: Tiny, text_folder: Path) -> None:
    """TRIME's domain adaptation: model of one corpus, memory and test text of another."""
    other = ["dataset@evaluate.dataset=folder_words", f"evaluate.dataset.path={text_folder}", "evaluate.dataset.suffix=.txt"]
    store = ["dataset@datastore.dataset=folder_words", f"datastore.dataset.path={text_folder}", "datastore.dataset.suffix=.txt"]
    config = tiny("experiment=knn_lm", "mixture=none", *other, *store)
    run(config)
    results = json.loads((Graph(config).run_folder / "results.json").read_text())
    assert results["evaluation_dataset"]["vocabulary"] == results["dataset"]["vocabulary"]
    assert results["evaluation_dataset"]["fingerprint"] != results["dataset"]["fingerprint"]
    assert results["datastore"]["dataset"] == text_folder.name and results["datastore"]["entries"] > 1000
    assert any(note.startswith("test: 1 of 3") and "also in train" in note for note in results["duplicates"])
    table = (Graph(config).run_folder / "table.md").read_text()
    assert all(note in table for note in results["duplicates"])


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["dataset@evaluate.dataset=folder_words", "evaluate.dataset.path=TEXT", "datastore.split=valid"], [True, False]),
        (["dataset=folder_words", "dataset.path=TEXT", "datastore.split=test"], [False, True]),  # under another name
    ],
)
def test_a_store_of_the_scored_split_hides_own_entries(
    words: list[str], hidden: list[bool], tiny: Tiny, text_folder: Path
) -> None:
    store = "dataset@datastore.dataset=folder_words", "datastore.dataset.path=TEXT", "stages=[prepare,fit,encode,index]"
    graph = Graph(tiny("experiment=knn_lm", *(word.replace("TEXT", str(text_folder)) for word in (*store, *words))))
    run(graph.config)
    graph.test.make()
    asked = [graph.valid.summary(), graph.test.summary()]
    assert [graph.memories.datastores[0].index.knn_memory(split).hide_own for split in asked] == hidden


def test_a_given_model_and_datastore_give_the_same_results(tiny: Tiny, text_folder: Path) -> None:
    """Documents of test in the datastore are said, also where it holds only the starts of its documents."""
    settings = ["experiment=knn_lm", "mixture=none", "dataset=folder_words", "dataset.suffix=.txt", "datastore.tokens=900"]
    settings.append(f"dataset.path={text_folder}")
    graph = Graph(tiny(*settings))
    loss = run(graph.config).loss
    given = Graph(tiny(*settings, f"checkpoint={graph.model.path()}", f"datastore.path={graph.store_of(graph.config).path()}"))
    assert run(given.config).loss == loss
    notes = [note for note in given.duplicates if "datastore.path=" in note]
    assert [note.split(" documents")[0] for note in notes] == ["valid: 2 of 3", "test: 1 of 3"]
    assert "test/0.txt" in notes[1] and "as" not in notes[1].split("instance")[1].split(")")[0]


def test_index_backends(tiny: Tiny, text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["experiment=knn_lm", "mixture=none", "index.nprobe=16", "dataset=folder_words", f"dataset.path={text_folder}"]
    monkeypatch.setattr(indices, "EXACT_UP_TO", 100)
    factories = {"null": 0, "Flat": 1e-4, "Flat index.rescore=true": 1e-4, "IVF16_SQ8": 0.05, "auto": 0.05}
    losses = [run(tiny(*few, *f"index.factory={factory}".split())).loss for factory in factories]
    assert losses[0] is not None
    for loss, tolerance in zip(losses, factories.values(), strict=True):
        assert loss == pytest.approx(losses[0], abs=tolerance)
    index = Graph(tiny(*few, "index.factory=auto")).memories.datastores[0].index
    assert index is not None and index.summary()["nprobe"] > 1 and index.summary()["expected_recall"] >= 0.95


def test_a_store_of_8_bits_costs_half_and_hardly_changes_the_loss(tiny: Tiny, tmp_path: Path, text_folder: Path) -> None:
    few = ["experiment=knn_lm", "dataset=folder_words", f"dataset.path={text_folder}", f"paths.outputs={tmp_path}"]
    losses, sizes = [], []
    for dtype in ("float16", "int8"):
        config = tiny(*few, f"datastore.dtype={dtype}")
        losses.append(run(config).loss)
        store = Graph(config).store_of(config).path()
        sizes.append(sum(load_file(file)["g"].nbytes for file in store.glob("*.safetensors")))
    assert losses[1] == pytest.approx(losses[0], abs=0.02) and losses[1] != losses[0]
    assert sizes[1] == sizes[0] / 2


@pytest.mark.parametrize("section", ["datastore", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_time_and_disk_are_forecast(
    section: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What will be written, to a fifth; refused where the disk has less."""
    monkeypatch.setattr(encode, "FORECAST_TOKENS", 100)
    config = tiny("experiment=knn_lm", f"paths.outputs={tmp_path}", "datastore.tokens=20k", "evaluate.tokens=20k")
    graph = Graph(config)
    for stage in ("prepare", "fit"):
        for artefact in graph.artefacts_of(stage):
            artefact.make()
    told = graph.store_of(config) if section == "datastore" else graph.valid
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: disk._replace(free=1000))
    with pytest.raises(UserError, match="free space"):
        told.make()
    monkeypatch.undo()
    monkeypatch.setattr(encode, "FORECAST_TOKENS", 100)
    monkeypatch.setattr(encode, "SHARD", 2000)
    told.make()
    line = next(line for line in capsys.readouterr().out.splitlines() if "minutes" in line)
    said = float(line.split(" and ")[1].split()[0].replace(",", ""))
    written = sum(file.stat().st_size for file in told.path().glob("*.safetensors")) / 2**20
    assert said == pytest.approx(written, rel=0.2, abs=0.5) and written > 1


@pytest.mark.parametrize(
    ("experiment", "is_lost"), [("memorizing", False), pytest.param("memorizing", True, marks=pytest.mark.slow)]
)
def test_a_killed_encoding_writes_the_same_bytes(
    experiment: str, is_lost: bool, tiny: Tiny, tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with a memory goes on with the state after the last shard; without it, it reads the text again."""
    save, shards, saved = encode.save_reader_state, [], Mock(side_effect=[None, None, SystemExit(9)])
    for place in ("broken", "whole"):
        graph = Graph(
            tiny(
                f"experiment={experiment}",
                "dataset=folder_words",
                f"dataset.path={text_folder}",
                f"paths.outputs={tmp_path / place}",
            )
        )
        encoded = graph.valid
        for artefact in (graph.corpus, graph.fit):
            artefact.make()
        with monkeypatch.context() as patch:
            patch.setattr(encode, "SHARD", 300)
            if place == "broken":
                with patch.context() as killed:
                    killed.setattr(encode, "save_reader_state", lambda *given: (saved(), save(*given)))
                    with pytest.raises(SystemExit):
                        encoded.make()
                states = {path.name for path in partial_of(encoded.folder).glob("*carried*") if path.suffix != ".partial"}
                assert bool(states) == (experiment == "memorizing")
                for name in states if is_lost else ():
                    (partial_of(encoded.folder) / name).unlink()
            encoded.make()
        shards.append({file.name: file.read_bytes() for file in encoded.path().glob("*.safetensors")})
    assert shards[0] == shards[1] and len(shards[0]) > 3
