"""A hash that identifies the settings that determine a run's results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.common.io import plain
from trime.lab.settings import without

DATASET_PLACES = ("path", "cache")  # where text lies does not decide what it is
QUESTION_PLACES = ("questions.path", "questions.babi", "questions.background")

IGNORED = (  # settings and sections that no result depends on
    *("paths", "artefacts", "storage", "export", "logger", "report", "frontier", "stages", "seed", "expected", "name"),
    *("dictionary", "generate", "explain", "prompt_file"),
    *("train.checkpoint_every", "train.log_every", "search", "threads", "engine"),
    *("evaluate.batch_tokens", "evaluate.analysis", "evaluate.per_token", "evaluate.subsets"),
    *("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes", "trainer.enable_progress_bar"),
    *("index.engine", "index.address", "index.replicas", "index.cores", "index.device"),
    *("batching.seed", "answering.batch_size", "translation.batch_size"),
    *QUESTION_PLACES,
)
VALIDATION = ("train.validate_every", "train.validate_tokens")  # they decide which weights are best, not the last ones


def identify_text(dataset: dict[str, Any]) -> dict[str, Any]:
    """Remove from a dataset's settings what does not decide which text it is, and return them."""
    if dataset.get("suffix") == ".txt":
        del dataset["suffix"]  # as before it was a setting: what was made from such a folder is found again
    if dataset.get("seed") == "auto":
        dataset["seed"] = 0  # where it is not, the hash of the text says so
    return without(dataset, DATASET_PLACES)


def config_hash(config: DictConfig) -> str:
    """Return the hash of what determines a run's results: its configuration without paths, loggers, devices and seeds.

    A checkpoint is identified by the name of its folder and text by its dataset's settings, not by where they lie.
    """
    content = without(plain(config), IGNORED)
    if given := content["checkpoint"] and Path(content["checkpoint"]):
        content["checkpoint"] = given.parent.name if given.suffix == ".pt" else given.name
    if content["train"]["keep"] == "last":
        without(content, VALIDATION)
    if not any(content["callbacks"].values()):
        content.pop("callbacks")
    own = [node["datastore"] for node in content["test_memories"].values() if "datastore" in node]
    for part in (content, content["evaluate"], content["datastore"], *own):
        if part.get("dataset"):
            identify_text(part["dataset"])
    text = json.dumps(content, sort_keys=True)
    if packaged := content["model"].get("hub"):  # wherever the folder made from the package lies
        text = text.replace(json.dumps(content["model"]["folder"]), json.dumps(packaged))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
