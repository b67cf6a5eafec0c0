"""Send a run's results to its experiment logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trime.report.tables import run_table


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
