"""Experiments under reproduce/script and reproduce/released against the published commands, flag by flag.

``tests/published_commands.json`` holds every flag of every published command, and the architectures behind ``--arch``. A flag
is either what the composed experiment says, or its row, or the file that it extends, names it in a comment
``# Deviation (--flag): why``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.conftest import ROOT, composed
from tests.conftest import experiment as composed_once
from trime.common.io import plain
from trime.config.rows import all_rows

COMMANDS = json.loads((ROOT / "tests" / "published_commands.json").read_text())
TRAIN_TOKENS = {"wikitext103": 103_227_021, "enwik8": 90_000_000}  # of the training streams, ends of lines included
DEVICES = 4  # of the authors (their README)
Flags = dict[str, Any]


def deviations(experiment: str) -> set[str]:
    """Return the flags that a row, or the file of what all commands have in common, names as deviations."""
    (text,) = (row.text for row in all_rows() if row.experiment == experiment)
    if "reproduce/commands" in text:
        text += (ROOT / "conf" / "experiment" / "reproduce" / "commands.yaml").read_text()
    named = re.findall(r"^# Deviation \(([^)]*)\):", text, re.MULTILINE)
    return {flag.strip().removeprefix("--") for names in named for flag in names.split(",")}


def differing(flags: Flags, checks: dict[str, Callable[[str], bool]]) -> set[str]:
    """Return the flags whose value the checks do not confirm, those that no check knows included."""
    return {flag for flag, value in flags.items() if not (flag in checks and checks[flag](value))}


def number(expected: float | None) -> Callable[[str], bool]:
    return lambda value: expected is not None and math.isclose(float(value), expected, rel_tol=1e-9)


def word(*expected: str) -> Callable[[str], bool]:
    return lambda value: value in expected


def architecture(config: DictConfig) -> dict[str, Callable[[str], bool]]:
    """Checks of what an architecture says, whether by its default or by a flag."""
    model = config.model
    cutoffs = [str(cutoff) for cutoff in model.cutoffs]

    def same_cutoffs(value: str) -> bool:
        bands = value.strip("'").split(",")
        return bands == cutoffs or (not cutoffs and bands == ["208"])  # enwik8: one band of the whole vocabulary

    def given(expected: bool) -> Callable[[Any], bool]:
        return lambda value: str(value).lower() == str(expected).lower()

    return {
        "decoder_layers": number(model.backbone.layers),
        "decoder_attention_heads": number(model.backbone.heads),
        "decoder_embed_dim": number(model.width),
        "decoder_ffn_embed_dim": number(model.backbone.inner),
        "dropout": number(model.backbone.dropout),
        "attention_dropout": number(model.backbone.inner_dropout),
        "activation_dropout": number(model.backbone.inner_dropout),
        "adaptive_softmax_dropout": number(model.softmax_dropout),
        "adaptive_input": given(model.embedding._target_.endswith(".AdaptiveInput")),
        "tie_adaptive_weights": given(model.head._target_.endswith(".AdaptiveSoftmax")),
        "tie_adaptive_proj": given(model.tied_projections),
        "adaptive_input_cutoff": same_cutoffs,
        "adaptive_softmax_cutoff": same_cutoffs,
        "adaptive_softmax_factor": number(model.factor),
        "adaptive_input_factor": number(model.factor),
        "no_decoder_final_norm": given(not model.backbone.final_norm),
        "learn_mem_weight": given(bool(model.gate)),
    }


def updates_per_epoch(config: DictConfig) -> int:
    """Return the updates of an epoch in the published trainer: devices side by side, so many steps an update."""
    segments = math.ceil(TRAIN_TOKENS[dataset(config)] / config.segments.length)
    steps = math.ceil(math.ceil(segments / (config.batching.size // DEVICES)) / DEVICES)
    return math.ceil(steps / updated_steps(config))


def updated_steps(config: DictConfig) -> float:
    """Return the steps of the published trainer that make an update here."""
    return config.train.accumulate / (1 if config.batching.joined else DEVICES)


def dataset(config: DictConfig) -> str:
    return "enwik8" if "enwik8" in config.dataset._target_ else "wikitext103"


def criterion(config: DictConfig) -> str:
    """Return the published name of the loss: over which memories it is, and whether they are a device's own."""
    kind = config.memory.visibility._target_.rsplit(".", 1)[-1]
    if kind == "Long":
        return "trime_long_loss" if config.batching.joined else "trime_long_loss_same_device"
    return {"Local": "trime_loss", "External": "trime_ext_loss"}[kind]


def training(config: DictConfig) -> dict[str, Callable[[str], bool]]:
    """Checks of a training command's flags."""
    schedule, optimizer, batching, length = config.schedule, config.optimizer, config.batching, config.segments.length
    cosine = schedule._target_.endswith(".Cosine")
    optimizers = {"trime.training.optimizers.NAG": "nag", "trime.training.optimizers.Adam": "adam"}
    combined = batching.combined * length * batching.size // DEVICES
    checks = {
        "task": lambda value: value.startswith("language_modeling") and dataset(config)[:6] in value.replace("-", ""),
        "criterion": word(criterion(config)),
        "optimizer": word(optimizers.get(optimizer._target_, "")),
        "adam-betas": lambda value: [*map(float, value.strip("()").split(","))] == list(optimizer.get("betas", [])),
        "weight-decay": number(optimizer.weight_decay),
        "clip-norm": number(config.train.clip_norm),
        "max-update": number(config.train.updates),
        "lr-scheduler": word("cosine" if cosine else "inverse_sqrt"),
        "max-lr": number(schedule.peak if cosine else None),
        "lr": number(schedule.floor if cosine else schedule.peak),
        "warmup-updates": number(schedule.warmup),
        "warmup-init-lr": number(schedule.initial),
        "t-mult": number(schedule.get("stretch")),
        "lr-period-updates": number(schedule.get("period")),
        "lr-shrink": number(schedule.get("shrink")),
        "min-lr": lambda value: float(value) < schedule.floor,  # never reached, so that nothing stops early
        "max-tokens": number(length * batching.size // batching.processes),
        "tokens-per-sample": number(length),
        "update-freq": number(updated_steps(config)),
        "required-batch-size-multiple": number(batching.multiple),
        "seed": number(batching.seed),
        "sample-break-mode": lambda value: value == "none" and not config.segments.bounded,
        "knn-keytype": word("last_ffn_input"),  # g of every backbone: there is no other
        "ce-warmup-epoch": lambda value: same_epochs(config, float(value)),
        "keep-order": lambda value: value is (batching.order == "kept"),
        "predefined-batches": lambda value: batching.order == "bm25" and batching.k == 20,
        "cross-sent-ratio": number(config.memory.drop_local),
        "train-mem-size": number(combined),
        "arch": lambda value: not differing_architecture(config, COMMANDS["architectures"][value]),
    }
    own = architecture(config)
    return checks | {name.replace("_", "-"): check for name, check in own.items()}


def same_epochs(config: DictConfig, epochs: float) -> bool:
    """Whether the plain phase lasts so many epochs, but for the rounding of a share with three digits."""
    share = epochs * updates_per_epoch(config) / config.train.updates
    return abs(config.train.plain_share - share) < 1e-4


def differing_architecture(config: DictConfig, given: Flags) -> set[str]:
    """Return the values of an architecture that differ; its kind of key is overridden by --knn-keytype in every command."""
    return differing({name: value for name, value in given.items() if name != "knn_type"}, architecture(config))


def script_of(command: str) -> str:
    """Return the experiment of a training command: wiki103-247M-trime_ext is script/trime_ext_247m."""
    corpus, size, row = command.split("-")
    return f"reproduce/script/{row}_{'enwik8' if corpus == 'enwik8' else size.lower()}"


@pytest.mark.parametrize("command", list(COMMANDS["train"]))
def test_a_training_command(command: str) -> None:
    experiment, flags = script_of(command), COMMANDS["train"][command]
    config = composed_once(experiment)
    assert differing(flags, training(config)) <= deviations(experiment)
    assert config.train.keep == "best" and plain(config.compatibility) == plain(
        composed("compatibility=published").compatibility
    )
    assert config.batching.processes == DEVICES and config.batching.string_ids


def test_every_flag_is_compared() -> None:
    """A changed value of any setting that a flag speaks of is noticed."""
    experiment = "reproduce/script/trime_ext_247m"
    flags = COMMANDS["train"]["wiki103-247M-trime_ext"]
    for override, flag in {
        "batching.size=8": "max-tokens",
        "train.accumulate=3": "update-freq",
        "optimizer=adam": "optimizer",
        "batching.seed=0": "seed",
        "memory.drop_local=0.5": "cross-sent-ratio",
        "train.plain_share=0.05": "ce-warmup-epoch",
        "model.backbone.dropout=0.1": "arch",
        "schedule.shrink=0.1": "lr-shrink",
        "batching.order=shuffled": "predefined-batches",
    }.items():
        assert flag in differing(flags, training(composed(f"experiment={experiment}", override)))
