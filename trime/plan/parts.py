"""Opens the parts of an artefact in another process, from the configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.engines.base import Job, MakePart
from trime.kernels.cpu import prepare_cpu
from trime.pipeline.processes import device_of


def open_parts(plan_of: Callable[[DictConfig], Any], job: Job) -> MakePart:
    """Return what makes the parts of a job's artefact, which is one of the plan of the job's settings."""
    config = OmegaConf.create(job.settings)
    assert isinstance(config, DictConfig)
    if device_of(config).type == "cpu":
        prepare_cpu()
    (artefact,) = [artefact for artefact in plan_of(config).made_by(job.stage) if artefact.name == job.name]
    make: MakePart = artefact.open_parts(job.folder).make
    return make
