"""The name of what decides a run's figures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from omegaconf import DictConfig

from trime.io import plain

APART = (
    "paths",
    "logger",
    "report",
    "frontier",
    "stages",
    "seed",
    "expected",
    "name",
    "dictionary",
)  # no figure depends on them


HARMLESS = {
    "train": ("checkpoint_every", "log_every"),
    "evaluate": ("batch_tokens", "analysis", "subsets"),
    "trainer": ("accelerator", "devices", "enable_progress_bar"),
    "answering": ("batch",),
    "questions": ("path", "babi", "background"),
}


VALIDATION = ("validate_every", "validate_tokens")


PLACES = ("path", "cache")  # of a dataset: what is read there is known by its counts


def config_hash(config: DictConfig) -> str:
    """Names what decides a run's figures: its configuration without places, loggers, devices and seeds.

    A released checkpoint counts by the name of its folder, text by its dataset's settings, not by where it lies.
    """
    content = {key: value for key, value in plain(config).items() if key not in APART}
    content["checkpoint"] = content["checkpoint"] and Path(content["checkpoint"]).parent.name
    for section, names in HARMLESS.items():
        content[section] = {key: value for key, value in content[section].items() if key not in names}
    if content["train"]["keep"] == "last":  # else they decide which weights are kept
        content["train"] = {key: value for key, value in content["train"].items() if key not in VALIDATION}
    content["batching"].pop("seed", None)
    for part in (content, content["evaluate"], content["datastore"]):
        if part.get("dataset"):
            part["dataset"] = {key: value for key, value in part["dataset"].items() if key not in PLACES}
    text = json.dumps(content, sort_keys=True)
    if packaged := content["model"].get("hub"):  # wherever the folder lies that was made of it
        text = text.replace(json.dumps(content["model"]["folder"]), json.dumps(packaged))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
