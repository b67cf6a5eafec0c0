"""The experiment loggers of a run (W&B, offline by default), through Lightning's loggers."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from hydra.utils import get_object, instantiate
from pytorch_lightning.loggers import Logger

from trime.common.io import write_atomically
from trime.errors import UserError


def build_loggers(settings: Any, folder: Path) -> list[Logger]:
    """Return the Lightning loggers of a run; files lie in the run's folder. UserError where a part is not a logger.

    ``settings`` is the section ``logger``.
    """
    loggers = []
    for name, part in settings.lightning.items():
        if part is None:
            continue
        if part._target_.endswith(".WandbLogger"):
            set_up_wandb(offline=bool(part.get("offline")))
        folder.mkdir(parents=True, exist_ok=True)
        identity: dict[str, Any] = {}
        if part._target_.endswith(".WandbLogger") and "id" not in part:
            identity = {"id": wandb_id(folder), "resume": "allow"}
        writes_files = "save_dir" in inspect.signature(get_object(part._target_)).parameters and "save_dir" not in part
        logger = instantiate(part, _convert_="all", **({"save_dir": str(folder)} if writes_files else {}), **identity)
        if not isinstance(logger, Logger):
            raise UserError(f"logger.lightning.{name}: {part._target_} is not a Lightning logger")
        loggers.append(logger)
    return loggers


def wandb_id(folder: Path) -> str:
    """Return the W&B id of a run, made once and kept in its folder: a killed run continues as the same one."""
    file = folder / "wandb" / "id.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, uuid4().hex[:12])
    return file.read_text().strip()


def set_up_wandb(offline: bool) -> None:
    """Make W&B quiet before Lightning starts it: Lightning passes a deprecated setting, of which W&B would warn."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if offline:  # Lightning sets this only when it starts the run, after W&B has read its environment
        os.environ["WANDB_MODE"] = "offline"
    wandb.setup()


@contextmanager
def finishing_wandb_run() -> Iterator[None]:
    """Finish the W&B run that is started in the block, whatever happens: the next run of a sweep starts its own."""
    before = active_wandb_run()
    try:
        yield
    finally:
        run = active_wandb_run()
        if run is not None and run is not before:
            run.finish()


def active_wandb_run() -> Any:
    """Return the W&B run in progress, if there is one, without importing W&B where nothing has used it."""
    return getattr(sys.modules.get("wandb"), "run", None)
