"""A hash that identifies the settings that determine a run's results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.common.identity import fingerprint_of
from trime.common.io import plain
from trime.config.fields import free_settings
from trime.config.schema import Settings

DATASET_PLACES = ("path", "cache")  # where text lies does not decide what it is
QUESTION_PLACES = ("questions.path", "questions.background")

NOT_COMPARED = (  # what else does not tell two results apart: seeds, places, and published numbers beside them
    *("seed", "dictionary", "evaluate.subsets", "batching.seed"),
    *QUESTION_PLACES,
)
VALIDATION = ("train.validate_every", "train.validate_tokens")  # they decide which weights are best, not the last ones


def identify_text(dataset: dict[str, Any]) -> dict[str, Any]:
    """Remove from a dataset's settings what does not decide which text it is, and return them."""
    if dataset.get("suffix") == ".txt":
        del dataset["suffix"]  # as before it was a setting: what was made from such a folder is found again
    if dataset.get("copies") == "say":
        del dataset["copies"]  # likewise
    if dataset.get("seed") == "auto":
        dataset["seed"] = 0  # where it is not, the hash of the text says so
    return without(dataset, DATASET_PLACES)


def config_hash(config: DictConfig) -> str:
    """Return the hash of what determines a run's results: its configuration without paths, loggers, devices and seeds.

    A checkpoint is identified by the name of its folder and text by its dataset's settings, not by where they lie.
    """
    content = without(plain(config), [*free_settings(Settings), *NOT_COMPARED])
    if given := content["checkpoint"] and Path(content["checkpoint"]):
        content["checkpoint"] = given.parent.name if given.suffix == ".pt" else given.name
    if content["train"]["keep"] == "last":
        without(content, VALIDATION)
    if not content["model"].get("recall"):
        content["model"].pop("recall", None)  # as before it was a setting
    if not content["trainer"].get("compile"):
        content["trainer"].pop("compile", None)  # as before it was a setting
    if not any(content["callbacks"].values()):
        content.pop("callbacks")
    own = [node["datastore"] for node in content["test_memories"].values() if "datastore" in node]
    for part in (content, content["evaluate"], content["datastore"], *own):
        if part.get("dataset"):
            identify_text(part["dataset"])
    return fingerprint_of(content)


def without(content: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Remove these dotted keys from plain settings, and return them."""
    for key in keys:
        *sections, name = key.split(".")
        place: Any = content
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(name, None)
    return content
