"""Every flag of the published translation commands: equal in the composed configuration, or named in its row's deviations."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.conftest import ROOT, experiment
from trime.common.io import plain
from trime.stages.ledger import expected_cells, reproductions

COMMANDS = json.loads((ROOT / "tests" / "published_commands.json").read_text())["evaluate"]
PREPROCESS, VANILLA, KNN, TRIME, STORE, TRAIN, BM25 = (
    "Preprocess Datasets",
    "Run Pre-Trained Models / Baseline: Transformer Encoder-Decoder",
    "Run Pre-Trained Models / Baseline: kNN-MT",
    "Run Pre-Trained Models / Our Approach: TrimeMT",
    "Run Pre-Trained Models / Build External Memory",
    "Train TrimeMT / Training Scripts",
    "Train TrimeMT / BM25 Batching",
)
FOLLOWS = {
    "released/mt_vanilla": (PREPROCESS, VANILLA),
    "released/knn_mt": (PREPROCESS, STORE, KNN),
    "released/trime_mt": (PREPROCESS, STORE, TRIME),
    "script/knn_mt": (PREPROCESS, TRAIN, STORE, KNN),
    "script/trime_mt": (PREPROCESS, BM25, TRAIN, STORE, TRIME),
}
Equal = Callable[[DictConfig, str], bool]


def at(key: str, read: Callable[[str], Any] = str) -> Equal:
    """The setting has the flag's value."""
    return lambda config, value: OmegaConf.select(config, key) == read(value)


def is_(key: str, wanted: Any) -> Equal:
    """The setting has what the flag means."""
    return lambda config, value: plain(OmegaConf.select(config, key)) == wanted


def every(*tests: Equal) -> Equal:
    return lambda config, value: all(test(config, value) for test in tests)


def listed(key: str, read: Callable[[str], Any]) -> Equal:
    """The grid has the flag's value alone."""
    return lambda config, value: plain(OmegaConf.select(config, key)) == [read(value)]


def epochs(config: DictConfig, value: str) -> bool:
    """So many of the 50 epochs train the plain model."""
    return config.train.plain_share == int(value) / 50


ARCHITECTURE = {"translation.width": 512, "translation.layers": 6, "translation.heads": 4, "translation.inner": 1024}
EQUAL: dict[str, Equal] = {
    "source-lang": at("dataset.source"),
    "target-lang": at("dataset.target"),
    "gen-subset": lambda config, value: {cell["split"] for cell in expected_cells(plain(config.expected))} == {value},
    "beam": at("translation.beam", int),
    "lenpen": at("translation.length_penalty", float),
    "max-len-a": lambda config, value: config.translation.max_length[0] == float(value) and config.translation.min_length == 1,
    "max-len-b": lambda config, value: config.translation.max_length[1] == float(value),
    "scoring": lambda config, value: (
        value == "sacrebleu" and {cell["measure"] for cell in expected_cells(plain(config.expected))} == {"bleu"}
    ),
    "tokenizer": every(is_("dataset.detokenize", True), lambda _, value: value == "moses"),
    "remove-bpe": is_("dataset.cut", True),
    "arch": every(
        *(is_(key, value) for key, value in ARCHITECTURE.items()),
        is_("model.backbone.inner_dropout", 0.0),
        is_("model.backbone.positions", 1024),
        lambda _, value: value == "transformer_iwslt_de_en",
    ),
    "share-decoder-input-output-embed": every(is_("model.head.tied", True), is_("translation.joined_dictionary", False)),
    "decoder-normalize-before": every(
        is_("model.backbone.decoder_norm_first", True), is_("model.backbone.encoder_norm_first", False)
    ),
    "optimizer": is_("optimizer._target_", "trime.training.optimizers.Adam"),
    "adam-betas": lambda config, value: tuple(config.optimizer.betas) == ast.literal_eval(value),
    "clip-norm": at("train.clip_norm", float),
    "lr": at("schedule.peak", float),
    "lr-scheduler": every(is_("schedule._target_", "trime.training.schedules.InverseSquareRoot"), is_("schedule.initial", 0.0)),
    "warmup-updates": at("schedule.warmup", int),
    "ce-warmup-epoch": epochs,
    "dropout": at("translation.dropout", float),
    "weight-decay": at("optimizer.weight_decay", float),
    "criterion": every(
        is_("memory._target_", "trime.memory.training.in_batch_nearest.NearestInBatch"),
        is_("memory.visibility._target_", "trime.memory.training.visibility.Others"),
        is_("translation.key", "f"),
        lambda _, value: value == "trime_mt_loss",
    ),
    "label-smoothing": at("translation.smoothing", float),
    "eval-bleu": is_("translation.best_by", "bleu"),
    "best-checkpoint-metric": every(at("translation.best_by"), is_("train.keep", "best")),
    "maximize-best-checkpoint-metric": is_("translation.best_by", "bleu"),
    "dist-func": at("memory.metric"),
    "temp": at("memory.temperature", float),
    "topk-mem": at("memory.k", int),
    "task": at("task"),
    "valid-subset": at("datastore.split"),
    "decoder-embed-dim": at("translation.width", int),
    "dstore-fp16": is_("datastore.dtype", "float16"),
    "dstore-size": is_("datastore.tokens", None),
    "dstore_size": is_("datastore.tokens", None),
    "ncentroids": lambda config, value: config.index.factory == f"IVF{value}_PQ64",  # --code_size is 64 by default
    "probe": at("index.nprobe", int),
    "dimension": at("translation.width", int),
    "dist": is_("translation.key", "f"),  # DIST is ip for TrimeMT and l2 for kNN-MT: index.metric, tested with the overrides
}
TRAINING = {"max-tokens": every(at("batching.tokens", int), is_("batching.processes", 4), is_("batching.multiple", 8))}
OVERRIDES: dict[str, Equal] = {
    "k": listed("translation.k", int),
    "probe": at("index.nprobe", int),
    "dstore_fp16": is_("datastore.dtype", "float16"),
    "dstore_size": is_("datastore.tokens", None),
}
NO_RESULT = {  # flags that decide no result, and why
    "workers": "of preprocessing",
    "quiet": "what is printed",
    "eval-bleu-print-samples": "what is printed",
    "dataset-impl": "the form of a file",
    "skip-invalid-size-inputs-valid-test": "no sentence is longer than 1,024 pieces",
    "index_path": "a place",
    "samples_path": "a place",
    "results_path": "a place",
    "batch_file": "a place",
    "output-samples-to-file": "a place",
    "reset-optimizer": "of a run that writes samples and trains nothing",
}
OF_THE_WRITER = (
    "max-tokens",
    "eval-bleu",
    "eval-bleu-args",
    "eval-bleu-detok",
    "eval-bleu-remove-bpe",
)  # of samples, see above
STORES = ("max-tokens",)  # how much is encoded at a time: no key depends on it


def reproduction(name: str) -> DictConfig:
    return experiment(f"reproduce/{name}")


def commands(section: str) -> list[dict[str, Any]]:
    found = [command for command in COMMANDS if command["section"] == section]
    assert found, section
    return found


def deviations(name: str) -> str:
    """What the experiment's row names as deviations."""
    return " ".join(reproductions()[f"reproduce/{name}"].get("deviations", {}).values())


def decides_nothing(section: str, flag: str) -> bool:
    """No result depends on the flag in this command."""
    return flag in NO_RESULT or (section == BM25 and flag in OF_THE_WRITER) or (section == STORE and flag in STORES)


@pytest.mark.parametrize("name, section", [(name, section) for name, sections in FOLLOWS.items() for section in sections])
def test_every_flag_is_equal_or_named(name: str, section: str) -> None:
    config, said = reproduction(name), deviations(name)
    tests = EQUAL | (TRAINING if section == TRAIN else {})
    for command in commands(section):
        for flag, value in command["flags"].items():
            if flag == "model-overrides" or decides_nothing(section, flag):
                continue
            named = re.search(rf"--{flag}(?![\w-])", said) is not None
            equal = flag in tests and tests[flag](config, value)
            assert equal or named, f"--{flag} {value} is not what {name} has, and not named there"


@pytest.mark.parametrize("name, section", [(n, s) for n, sections in FOLLOWS.items() for s in sections if s in (KNN, TRIME)])
def test_model_overrides_are_equal(name: str, section: str) -> None:
    """The memory at test: metric, K, temperature and share, without recomputed distances."""
    config = reproduction(name)
    (command,) = commands(section)
    text = command["flags"]["model-overrides"]
    for variable, value in ({"DSTORE_PATH": "place"} | command["variables"]).items():
        text = re.sub(rf"\${variable}\b", value, text)
    found = ast.literal_eval(text)
    assert found["load_knn_datastore"] and found["use_knn_datastore"] and found["no_load_keys"]
    for key, test in OVERRIDES.items():
        assert test(config, found[key]), key
    assert config.translation.key == "f" and not config.index.rescore  # of the decoder's output, as save_datastore.py stores it
    assert found["knn_sim_func"] == {KNN: "do_not_recomp_l2", TRIME: None}[section]
    assert config.index.metric == found.get("faiss_metric_type", "l2")
    (*_, row), temperature = plain(config.evaluate.rows), found["knn_temperature_value"]
    if found["knn_lambda_type"] == "fix":
        assert row == {"joint": [], "interpolate": [["external"]]}
        assert plain(config.tune.interpolation_temperature) == [temperature] and not config.evaluate.scaled_interpolation
        assert plain(config.tune.interpolation_share) == [found["knn_lambda_value"]]
    else:
        assert found["knn_lambda_type"] == "trime" and row == {"joint": ["external"]}
        assert plain(config.tune.temperature) == [temperature] and config.translation.unweighted_external
    (*_, cell), (expected,) = expected_cells(plain(config.expected)), command["expected"]
    assert cell["value"] == float(expected)


def test_the_vanilla_result() -> None:
    (expected,) = commands(VANILLA)[0]["expected"]
    for name in ("released/mt_vanilla", "script/knn_mt"):
        assert expected_cells(plain(reproduction(name).expected))[0]["value"] == float(expected)


def test_a_changed_flag_is_told() -> None:
    """Each comparison fails for another value of its flag."""
    config = reproduction("script/trime_mt")
    (command,) = commands(TRAIN)
    changed = {"beam": "5", "lenpen": "1", "max-len-a": "1.5", "lr": "1e-3", "temp": "1", "topk-mem": "16", "dropout": "0.1"}
    changed |= {"ce-warmup-epoch": "9", "label-smoothing": "0.1", "dist-func": "l2", "adam-betas": "(0.9, 0.999)"}
    assert not any(EQUAL[flag](config, value) for flag, value in changed.items())
    assert not TRAINING["max-tokens"](config, "16384") and TRAINING["max-tokens"](config, command["flags"]["max-tokens"])
