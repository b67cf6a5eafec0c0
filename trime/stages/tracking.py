"""The experiment logger of a run (W&B, offline unless told otherwise), through Lightning's logger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate


def logger_of(settings: Any, folder: Path) -> Any:
    """The Lightning logger of a run, its files in the run's folder; None where conf/logger has none."""
    if not settings.lightning:
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    folder.mkdir(parents=True, exist_ok=True)
    return instantiate(settings.lightning, save_dir=str(folder), _convert_="all")


@contextmanager
def closing(plan: Any) -> Iterator[None]:
    """Ends the logger's run, if it was opened, whatever happens: the next run of a sweep starts its own."""
    try:
        yield
    finally:
        opened = getattr(plan.__dict__.get("logger"), "_experiment", None)
        if opened is not None:
            opened.finish()


def log_results(logger: Any, results: dict[str, Any]) -> None:
    """Hyperparameters, tuned settings, and the test figures of every row."""
    if logger is None:
        return
    own = results["metrics"]["test"][-1]
    figures = {f"test/{row['memories']}": row["perplexity"] for row in results["metrics"]["test"]}
    figures |= {"test/perplexity": own["perplexity"], "test/loss": own["loss"]}
    figures |= {f"tuned/{name}": value for name, value in results["tuned"].items()}
    logger.log_hyperparams({key: results[key] for key in ("name", "seed", "commit", "parameters")})
    logger.log_metrics(figures)
