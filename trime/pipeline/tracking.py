"""The experiment logger of a run (W&B, offline unless told otherwise), through Lightning's logger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate


def build_logger(settings: Any, folder: Path) -> Any:
    """The Lightning logger of a run, its files in the run's folder; None where conf/logger has none."""
    if not settings.lightning:
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    folder.mkdir(parents=True, exist_ok=True)
    logger = instantiate(settings.lightning, save_dir=str(folder), _convert_="all")
    asked = getattr(logger, "_wandb_init", {})
    if asked.get("anonymous", "") is None:  # Lightning gives it to W&B unasked, which then warns of it
        del asked["anonymous"]
    return logger


@contextmanager
def closing_logger(plan: Any) -> Iterator[None]:
    """Ends the logger's run, if it was opened, whatever happens: the next run of a sweep starts its own."""
    try:
        yield
    finally:
        opened = getattr(plan.__dict__.get("logger"), "_experiment", None)
        if opened is not None:
            opened.finish()
