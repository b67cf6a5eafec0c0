"""Send a run's results to an experiment logger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, WandbLogger

from trime.common.io import checksum_of, write_atomically
from trime.lab.provenance import PROVENANCE
from trime.report.passages import Sample
from trime.report.run_result import ScoredRun
from trime.report.tables import run_table

LOGGED = ".logged"  # in a run's folder: the checksum of the results that its loggers have, and of their settings


def log_once(
    loggers: Callable[[], list[Logger]],
    settings: Any,
    folder: Path,
    results: ScoredRun,
    samples: list[Sample],
    figures: dict[str, Path],
) -> None:
    """Log a report to every logger, unless the run whose ``folder`` it is has logged the same results before.

    ``settings`` of the loggers decide that, too: one that is added later gets results that are there already.
    """
    content = results.model_dump(exclude_unset=True, exclude={*PROVENANCE})
    marker, total = folder / LOGGED, checksum_of([content, settings])
    if marker.exists() and marker.read_text() == total:
        return
    for logger in loggers():
        log_results(logger, results, samples, figures)
    write_atomically(marker, total)


def log_results(logger: Logger, results: ScoredRun, samples: list[Sample], figures: dict[str, Path]) -> None:
    """Log hyperparameters, tuned settings and the metrics of every row; the report's table, samples and figures to W&B."""
    logger.log_hyperparams(results.model_dump(include={"name", "seed", "commit", "parameters"}))
    metrics: dict[str, float] = {f"tuned/{name}": value for name, value in results.tuned.items()}
    for split, rows in results.metrics.items():
        metrics |= {f"{split}/{row.memories}": row.perplexity for row in rows}
        metrics |= {f"{split}/perplexity": rows[-1].perplexity, f"{split}/loss": rows[-1].loss}
    logger.log_metrics(metrics)
    if isinstance(logger, WandbLogger):
        table = run_table(results)
        logger.log_table("results", columns=table.header, data=table.lines)
        if samples:
            columns = ["document", "token", "probability", "from memories", "entries"]
            logger.log_table("samples", columns=columns, data=[line for sample in samples for line in sample_lines(sample)])
        for name, path in figures.items():
            logger.log_image(name, [str(path)])
    logger.save()


def sample_lines(sample: Sample) -> list[list[Any]]:
    """Return a table line for each token of a sample."""
    lines = []
    for token in sample.tokens:
        entries = "\n".join(f"{entry.share:.4f} {entry.memory}: {entry.text} ({entry.place})" for entry in token.entries)
        lines.append([sample.document, token.text, token.probability, token.from_memories, entries])
    return lines
