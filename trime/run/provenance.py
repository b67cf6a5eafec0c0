"""The provenance of a result: run, code, command and machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trime.config.folder import CHECKOUT, IS_CHECKOUT, PROGRAM
from trime.pipeline.config_hash import config_hash

PACKAGES = (
    *("trime", "torch", "pytorch-lightning", "hydra-core", "faiss-cpu", "faiss-gpu", "bm25s", "rank-bm25", "numpy", "wandb"),
)
PROVENANCE = ("name", "created", "commit", "versions", "hardware", "command")  # keys of what made a result


def provenance(config: DictConfig) -> dict[str, Any]:
    """Return what a result was made from: run, time, commit, configuration hash, package versions, hardware and command."""
    return {
        "name": config.name,
        "seed": config.seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "config_hash": config_hash(config),
        "versions": versions(),
        "hardware": hardware(),
        "command": command(),
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
    cpus = [line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "host": platform.node(),
        "cpu": cpus[0] if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo; none on systems without it."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def commit() -> str | None:
    """Return the commit of the code, marked ``+changes`` if files were modified; None if it does not run from a checkout."""
    if not IS_CHECKOUT:
        return None
    root = CHECKOUT
    try:
        head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "-C", str(root), "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")
