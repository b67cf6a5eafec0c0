"""Records of a run by which others can repeat it: hash of its settings, command, commit, versions, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trime.common.identity import fingerprint_of
from trime.common.io import plain
from trime.config.fields import free_settings
from trime.config.folder import CHECKOUT, IS_CHECKOUT, PROGRAM
from trime.config.schema import Settings
from trime.report.run_result import effective

DATASET_PLACES = ("path", "cache")  # the place of a text does not decide which text it is
QUESTION_PLACES = ("questions.path", "questions.background")

NOT_COMPARED = (  # further settings that do not tell two results apart: seeds, places, published numbers
    *("seed", "dictionary", "evaluate.subsets", "batching.seed"),
    *QUESTION_PLACES,
)
VALIDATION = ("train.validate_every", "train.validate_tokens")  # they decide which weights are best, not the last ones


def identify_text(dataset: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of a dataset that do not decide which text it is, and return the rest."""
    if dataset.get("suffix") == ".txt":
        del dataset["suffix"]  # as before it was a setting: what was made from such a folder is found again
    if dataset.get("copies") == "say":
        del dataset["copies"]  # likewise
    if dataset.get("seed") == "auto":
        dataset["seed"] = 0  # where it is not, the hash of the text says so
    return without(dataset, DATASET_PLACES)


def config_hash(config: DictConfig) -> str:
    """Return the hash of the settings that determine results: the configuration without paths, loggers, devices and seeds.

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
    for section in (content, content["evaluate"], content["datastore"], *own):
        if section.get("dataset"):
            identify_text(section["dataset"])
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


PACKAGES = (
    *("trime", "torch", "pytorch-lightning", "hydra-core", "faiss-cpu", "faiss-gpu", "bm25s", "rank-bm25", "numpy", "wandb"),
)
PROVENANCE = (
    "name",
    "created",
    "commit",
    "versions",
    "hardware",
    "command",
    "overrides",
)  # fields on its making


def provenance(config: DictConfig) -> dict[str, Any]:
    """Return the fields of RunResult that every run records."""
    return {
        "name": config.name,
        "seed": config.seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "config_hash": config_hash(config),
        "versions": versions(),
        "hardware": hardware(),
        "command": command(),
        "overrides": effective(HydraConfig.get().overrides.task if HydraConfig.initialized() else []),
    }


def command() -> str | None:
    """Return the command line that repeats just this run; None if it was not started from the command line."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    overrides = [override for override in hydra.overrides.task if not override.startswith("sweep=")]
    # The file of a table or an ablation starts a sweep by itself, without -m, unless hydra.mode says otherwise.
    by_file = hydra.mode == RunMode.MULTIRUN and "hydra.mode=MULTIRUN" not in hydra.overrides.hydra
    return shlex.join([*PROGRAM, *overrides, *["hydra.mode=RUN"] * by_file])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages on which results depend."""
    packages = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return packages


def hardware() -> dict[str, Any]:
    """Return the names of the host, the CPU and the GPU, and the numbers of cores and of threads."""
    cpu = platform.processor()
    with suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"host": platform.node(), "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def commit() -> str | None:
    """Return the commit of the code, marked ``+changes`` if files were modified; None if it does not run from a checkout."""
    if not IS_CHECKOUT:
        return None
    git = ["git", "-C", str(CHECKOUT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")
