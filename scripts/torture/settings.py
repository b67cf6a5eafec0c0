"""Every setting of a few experiments with values that it must not have, and misspelled; nothing may run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scripts.torture.outcome import Case, attempt
from trime.common.io import plain
from trime.config.check import validate
from trime.config.compose import compose_config
from trime.lab.runner import requested_stages
from trime.stages.preflight import check

EXPERIMENTS = (
    ("experiment=trime_ext",),
    ("experiment=trime_mt",),
    ("experiment=memorizing",),
    ("experiment=srupp_trime_long",),
    ("experiment=attendre_decoder",),
    (
        "experiment=trime_all",
        "batching=consecutive",
        "index=ivf",
        "head=softmax",
        "backbone=transformer_xl",
        "evaluate.context=0",
    ),
)
SWITCHES = ["[]", "no", "off", "yes", "maybe", "7", "1", "nan", "[true]", "{a: 1}", "null", "''"]
WHOLE = ["[]", "abc", "nan", "inf", "-inf", "1.5", "-7", "true", "[[1]]", "{a: 1}", "''", "1e400"]
NUMBERS = ["[]", "abc", "nan", "inf", "-inf", "true", "[[1]]", "{a: 1}", "''", "1e400"]
TEXTS = ["[1]", "{a: 1}", "nonsense"]
LISTS = ["abc", "{a: 1}", "[[[1]]]", "[{a: 1}]", "nan"]
# Settings whose values are free: names and paths that are looked up later, free data of other libraries, notes of experiments.
FREE = (
    "hydra",
    "paths",
    "callbacks",
    "logger.lightning",
    "report.figures",
    "report.published",
    "trainer.extra",
    "dataset.cache",
)
LABELS = ("name", "mixture.kind", "report.against", "report.name", "logger.project")  # texts that are any word
FRACTIONS = ("model.factor",)  # numbers that may have a fraction, though the experiments' have none


def leaves(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; lists are leaves."""
    if isinstance(content, dict) and content:
        for name, value in content.items():
            yield from leaves(value, f"{place}.{name}" if place else str(name))
    else:
        yield place, content


def malformed(value: Any) -> list[str]:
    """Return values that a setting with this value must not have, as the command line writes them."""
    if isinstance(value, bool):
        return SWITCHES
    if isinstance(value, int):
        return WHOLE
    if isinstance(value, float):
        return NUMBERS
    if isinstance(value, str):
        return TEXTS
    return LISTS if isinstance(value, list) else []


def every_case() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield experiment, key and malformed value; each key of the schema once."""
    done: set[str] = set()
    for experiment in EXPERIMENTS:
        for key, value in leaves(plain(compose_config(*experiment))):
            if key in done or any(f"{key}.".startswith(f"{free}.") for free in FREE) or key.endswith("_"):
                continue
            done.add(key)
            for wrong in malformed(float(value) if key in FRACTIONS else value):
                if not (wrong == "nonsense" and key in LABELS):
                    yield experiment, key, wrong
            yield experiment, f"{key}s", "1"


def campaign(count: int | None, seed: int) -> list[Case]:
    """Try ``count`` of the malformed settings, drawn at random; None: all of them."""
    cases = [*every_case()]
    if count is not None and count < len(cases):
        cases = random.Random(seed).sample(cases, count)
    composed: dict[tuple[str, ...], DictConfig] = {}
    results = []
    for experiment, key, wrong in cases:
        if experiment not in composed:
            composed[experiment] = compose_config(*experiment)
        config = copy.deepcopy(composed[experiment])
        what = f"{' '.join(experiment)} {key}={wrong}"
        results.append(
            attempt(what, lambda config=config, key=key, wrong=wrong: checked(config, key, wrong), key.split(".")[-1])
        )
    return results


def checked(config: DictConfig, key: str, value: str) -> str:
    """Set a key as the command line does, and make all checks that come before a run."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"{key}={value}")
    OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    validate(config)
    requested_stages(config)
    check(config)
    return "accepted"
