"""Send a run's results to an experiment logger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, WandbLogger

from trime.io import checksum_of, write_atomically
from trime.report.tables import run_table
from trime.run.provenance import PROVENANCE

LOGGED = ".logged"  # in a run's folder: the checksum of the results that its loggers have, and of their settings


def log_once(loggers: Callable[[], list[Logger]], settings: Any, folder: Path, *report: Any) -> None:
    """Log a report to every logger, unless the run whose ``folder`` it is has logged the same results before.

    ``settings`` of the loggers decide that, too: one that is added later gets results that are there already.
    """
    results = {key: value for key, value in report[0].items() if key not in PROVENANCE}
    marker, total = folder / LOGGED, checksum_of([results, settings])
    if marker.exists() and marker.read_text() == total:
        return
    for logger in loggers():
        log_results(logger, *report)
    write_atomically(marker, total)


def log_results(logger: Logger, results: dict[str, Any], samples: list[dict[str, Any]], figures: dict[str, Path]) -> None:
    """Log hyperparameters, tuned settings and the metrics of every row; the report's tables and figures to W&B."""
    logger.log_hyperparams({key: results[key] for key in ("name", "seed", "commit", "parameters")})
    metrics = {f"tuned/{name}": value for name, value in results["tuned"].items()}
    for split, rows in results["metrics"].items():
        metrics |= {f"{split}/{row['memories']}": row["perplexity"] for row in rows}
        metrics |= {f"{split}/perplexity": rows[-1]["perplexity"], f"{split}/loss": rows[-1]["loss"]}
    logger.log_metrics(metrics)
    if isinstance(logger, WandbLogger):
        log_report(logger, results, samples, figures)
    logger.save()


def log_report(logger: WandbLogger, results: dict[str, Any], samples: list[dict[str, Any]], figures: dict[str, Path]) -> None:
    """Log the report's table, samples and figures."""
    header, lines = run_table(results)
    logger.log_table("results", columns=header, data=lines)
    if lines := [line for sample in samples for line in sample_lines(sample)]:
        logger.log_table("samples", columns=["document", "token", "probability", "from memories", "entries"], data=lines)
    for name, path in figures.items():
        logger.log_image(name, [str(path)])


def sample_lines(sample: dict[str, Any]) -> list[list[Any]]:
    """Return a table line for each token of a sample."""
    return [
        [
            sample["document"],
            token["text"],
            token["probability"],
            token["probability"] - token["parts"]["vocabulary"],
            "\n".join(f"{e['share']:.4f} {e['memory']}: {e['text']} ({e['place']})" for e in token["entries"]),
        ]
        for token in sample["tokens"]
    ]
