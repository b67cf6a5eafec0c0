"""Opens the parts of an artefact in another process, from the configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.engines.base import Advance, Job, MakePart
from trime.errors import UserError
from trime.kernels.cpu import prepare_cpu
from trime.pipeline.parts import Parts
from trime.pipeline.pretrained import ensure_model_folder
from trime.pipeline.processes import device_of


def open_job(plan_of: Callable[[DictConfig], Any], job: Job) -> MakePart:
    """Return what makes the parts of a job's artefact, which is one of the plan of the job's settings.

    A part that is there already, because the process that made it was lost before it said so, is not made again.
    """
    config = OmegaConf.create(job.settings)
    assert isinstance(config, DictConfig)
    ensure_model_folder(config)  # another machine has none
    if device_of(config).type == "cpu":
        prepare_cpu()
    artefacts = [artefact for artefact in plan_of(config).made_by(job.stage) if artefact.name == job.name]
    if not artefacts:
        raise UserError(f"{job.stage}: a worker understands these settings differently: install the same on all machines")
    parts: Parts = artefacts[0].open_parts(job.folder)

    def make(number: int, advance: Advance) -> None:
        if parts.file(number).exists():
            advance(parts.sizes[number])
        else:
            parts.make(number, advance)

    return make
