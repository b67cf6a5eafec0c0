"""The experiment logger of a run (W&B, offline by default), through Lightning's logger."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate


def build_logger(settings: Any, folder: Path) -> Any:
    """Return the Lightning logger of a run, whose files lie in the run's folder; None if conf/logger has none."""
    if not settings.lightning:
        return None
    if settings.lightning._target_.endswith(".WandbLogger"):
        set_up_wandb(offline=bool(settings.lightning.get("offline")))
    folder.mkdir(parents=True, exist_ok=True)
    return instantiate(settings.lightning, save_dir=str(folder), _convert_="all")


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
