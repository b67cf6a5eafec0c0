"""The experiment logger of a run (W&B, offline unless told otherwise), through Lightning's logger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict


@contextmanager
def tracked(config: DictConfig, place: Path) -> Iterator[Tracker]:
    """Points the logger at the run's folder, and closes its run whatever happens."""
    tracker = Tracker(config)
    if config.logger.lightning:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        place.mkdir(parents=True, exist_ok=True)
        with open_dict(config):
            config.logger.lightning.save_dir = str(place)
    try:
        yield tracker
    finally:
        tracker.close()


class Tracker:
    """Logs a run's last figures beside its training curves."""

    def __init__(self, config: DictConfig):
        self.config = config
        self.logger: Any = None

    def finish(self, results: dict[str, Any]) -> None:
        """Hyperparameters, and dev and test figures of every row."""
        if not self.config.logger.lightning:
            return
        self.logger = instantiate(self.config.logger.lightning)
        own = results["metrics"]["test"][-1]
        figures = {f"test/{row['memories']}": row["perplexity"] for row in results["metrics"]["test"]}
        figures |= {"test/perplexity": own["perplexity"], "test/loss": own["loss"]}
        figures |= {f"tuned/{name}": value for name, value in results["tuned"].items()}
        self.logger.log_hyperparams({key: results[key] for key in ("name", "seed", "commit", "parameters")})
        self.logger.log_metrics(figures)

    def close(self) -> None:
        """Ends the logger's run, so that the next run of a sweep starts its own."""
        if self.config.logger.lightning and self.logger is None:
            self.logger = current(self.config)
        finish = getattr(getattr(self.logger, "experiment", None), "finish", None)
        if finish is not None:
            finish()


def current(config: DictConfig) -> Any:
    """The logger, where an interrupted run has one open; else None."""
    import sys

    wandb = sys.modules.get("wandb")
    return instantiate(config.logger.lightning) if wandb is not None and wandb.run is not None else None
