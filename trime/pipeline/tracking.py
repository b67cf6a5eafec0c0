"""The experiment logger of a run (W&B, offline unless told otherwise), through Lightning's logger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from trime.report.tables import run_table


def logger_of(settings: Any, folder: Path) -> Any:
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
def closing(plan: Any) -> Iterator[None]:
    """Ends the logger's run, if it was opened, whatever happens: the next run of a sweep starts its own."""
    try:
        yield
    finally:
        opened = getattr(plan.__dict__.get("logger"), "_experiment", None)
        if opened is not None:
            opened.finish()


def log_results(logger: Any, results: dict[str, Any], samples: list[dict[str, Any]], folder: Path) -> None:
    """Hyperparameters, tuned settings, the figures of every row, and the report's table, samples and pictures."""
    if logger is None:
        return
    logger.log_hyperparams({key: results[key] for key in ("name", "seed", "commit", "parameters")})
    figures = {f"tuned/{name}": value for name, value in results["tuned"].items()}
    for split, rows in results["metrics"].items():
        figures |= {f"{split}/{row['memories']}": row["perplexity"] for row in rows}
        figures |= {f"{split}/perplexity": rows[-1]["perplexity"], f"{split}/loss": rows[-1]["loss"]}
    logger.log_metrics(figures)
    header, lines = run_table(results)
    logger.log_table("results", columns=header, data=lines)
    if lines := [line for sample in samples for line in sample_lines(sample)]:
        logger.log_table("samples", columns=["document", "token", "probability", "from memories", "entries"], data=lines)
    for picture in ("picture", "memories", "analysis"):
        if (folder / f"{picture}.png").exists():
            logger.log_image(picture, [str(folder / f"{picture}.png")])


def sample_lines(sample: dict[str, Any]) -> list[list[Any]]:
    """A line for each token."""
    return [
        [
            sample["document"],
            told["text"],
            told["probability"],
            told["probability"] - told["parts"]["vocabulary"],
            "\n".join(f"{own['share']:.4f} {own['memory']}: {own['text']} ({own['place']})" for own in told["entries"]),
        ]
        for told in sample["tokens"]
    ]
