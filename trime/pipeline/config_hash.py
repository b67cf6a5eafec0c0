"""A hash that identifies the settings that determine a run's results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from omegaconf import DictConfig

from trime.io import plain

# Settings that no result depends on: whole sections, and single settings of other sections.
IGNORED_SECTIONS = ("paths", "logger", "report", "frontier", "stages", "seed", "expected", "name", "dictionary")
IGNORED = {
    "train": ("checkpoint_every", "log_every"),
    "evaluate": ("batch_tokens", "analysis", "subsets"),
    "trainer": ("accelerator", "devices", "enable_progress_bar"),
    "answering": ("batch",),
    "questions": ("path", "babi", "background"),
}
VALIDATION = ("validate_every", "validate_tokens")  # of train: they decide which weights are best, not the last ones
DATASET_PLACES = ("path", "cache")  # where text lies does not decide what it is


def config_hash(config: DictConfig) -> str:
    """Return the hash of what determines a run's results: its configuration without paths, loggers, devices and seeds.

    A released checkpoint is identified by the name of its folder and text by its dataset's settings, not by where they lie.
    """
    content = {key: value for key, value in plain(config).items() if key not in IGNORED_SECTIONS}
    content["checkpoint"] = content["checkpoint"] and Path(content["checkpoint"]).parent.name
    for section, names in IGNORED.items():
        content[section] = {key: value for key, value in content[section].items() if key not in names}
    if content["train"]["keep"] == "last":
        content["train"] = {key: value for key, value in content["train"].items() if key not in VALIDATION}
    content["batching"].pop("seed", None)
    if not any(content["callbacks"].values()):
        content.pop("callbacks")
    for part in (content, content["evaluate"], content["datastore"]):
        if part.get("dataset"):
            part["dataset"] = {key: value for key, value in part["dataset"].items() if key not in DATASET_PLACES}
    text = json.dumps(content, sort_keys=True)
    if packaged := content["model"].get("hub"):  # wherever the folder made from the package lies
        text = text.replace(json.dumps(content["model"]["folder"]), json.dumps(packaged))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
