"""The provenance of a result: run, code, command and machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trime.config.folder import CHECKOUT, IS_CHECKOUT, PROGRAM
from trime.lab.config_hash import config_hash
from trime.report.run_result import effective

PACKAGES = (
    *("trime", "torch", "pytorch-lightning", "hydra-core", "faiss-cpu", "faiss-gpu", "bm25s", "rank-bm25", "numpy", "wandb"),
)
PROVENANCE = ("name", "created", "commit", "versions", "hardware", "command", "overrides")  # fields of what made a result


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
    """Return the command line that repeats this run alone; None if it was not started from the command line."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    overrides = [override for override in hydra.overrides.task if not override.startswith("sweep=")]
    # The file of a table or an ablation starts a sweep by itself, without -m, unless it is told not to.
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
