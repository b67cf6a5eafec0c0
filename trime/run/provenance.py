"""What made a result: the run, its code, its command and its machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trime.pipeline.config_hash import config_hash

PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "faiss-cpu", "faiss-gpu", "bm25s", "rank-bm25", "numpy", "wandb")


def provenance(config: DictConfig) -> dict[str, Any]:
    """What made a result: the run, its code and its machine."""
    return {
        "name": config.name,
        "seed": config.seed,
        "commit": commit(),
        "config_hash": config_hash(config),
        "versions": versions(),
        "hardware": hardware(),
        "command": command(),
    }


def command() -> str | None:
    """What the run was asked for on the command line; None where it was not started there."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    own = [word for word in hydra.overrides.task if not word.startswith("sweep=")]
    alone = ["hydra.mode=RUN"] if hydra.mode == RunMode.MULTIRUN else []  # an ablation is a sweep by itself
    return shlex.join(["python", "cli.py", *own, *alone])


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine."""
    names = [line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "gpu": device}


def cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def commit() -> str | None:
    """The commit of the code, where it runs from a checkout."""
    here = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "-C", str(here), "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
