"""The experiment loggers of a run (W&B, offline by default), through Lightning's loggers."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from hydra.utils import get_object, instantiate
from pytorch_lightning.loggers import Logger, WandbLogger

from trime.common.io import checksum_of, write_atomically
from trime.errors import UserError
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
    if marker.exists() and marker.read_text(encoding="utf-8") == total:
        return
    for logger in loggers():
        log_results(logger, results, samples, figures, folder / "page.html")
    write_atomically(marker, total)


def log_results(logger: Logger, results: ScoredRun, samples: list[Sample], figures: dict[str, Path], page: Path) -> None:
    """Log hyperparameters, tuned settings and every row's metrics; to W&B the report's table, samples, figures and page."""
    logger.log_hyperparams(results.model_dump(include={"name", "seed", "commit", "parameters"}))
    metrics: dict[str, float] = {f"tuned/{name}": value for name, value in results.tuned.items()}
    for split, rows in results.metrics.items():
        metrics |= {f"{split}/{row.memories}": row.perplexity for row in rows}
        metrics |= {f"{split}/perplexity": rows[-1].perplexity, f"{split}/loss": rows[-1].loss}
        metrics |= {f"{split}/bleu": row.bleu for row in rows[-1:] if row.bleu is not None}
    logger.log_metrics(metrics)
    if isinstance(logger, WandbLogger):
        table = run_table(results)
        logger.log_table("results", columns=table.header, data=table.lines)
        if samples:
            columns = ["document", "token", "probability", "from memories", "entries"]
            logger.log_table("samples", columns=columns, data=[line for sample in samples for line in sample_lines(sample)])
        for name, path in figures.items():
            logger.log_image(name, [str(path)])
        if page.exists():
            from wandb import Html

            logger.experiment.log({"page": Html(page)})
    logger.save()


def sample_lines(sample: Sample) -> list[list[Any]]:
    """Return a table line for each token of a sample."""
    lines = []
    for token in sample.tokens:
        entries = "\n".join(f"{entry.share:.4f} {entry.memory}: {entry.text} ({entry.place})" for entry in token.entries)
        lines.append([sample.document, token.text, token.probability, token.from_memories, entries])
    return lines


def build_loggers(settings: Any, folder: Path) -> list[Logger]:
    """Return the Lightning loggers of a run; files lie in the run's folder. UserError where a component is not a logger.

    ``settings`` is the section ``logger``.
    """
    loggers = []
    for name, component in settings.lightning.items():
        if component is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        further: dict[str, Any] = {}
        if component._target_.endswith(".WandbLogger"):
            set_up_wandb(offline=bool(component.get("offline")))
            further = {"id": wandb_id(folder), "resume": "allow"} if "id" not in component else {}
        if "save_dir" in inspect.signature(get_object(component._target_)).parameters and "save_dir" not in component:
            further["save_dir"] = str(folder)
        logger = instantiate(component, _convert_="all", **further)
        if not isinstance(logger, Logger):
            raise UserError(f"logger.lightning.{name}: {component._target_} is not a Lightning logger")
        loggers.append(logger)
    return loggers


def wandb_id(folder: Path) -> str:
    """Return the W&B id of a run, made once and kept in its folder: a killed run continues as the same one."""
    file = folder / "wandb" / "id.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, uuid4().hex[:12])
    return file.read_text(encoding="utf-8").strip()


def set_up_wandb(offline: bool) -> None:
    """Make W&B quiet before Lightning starts it: Lightning passes a deprecated setting, and W&B would warn of it."""
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
