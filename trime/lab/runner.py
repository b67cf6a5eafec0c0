"""Run the stages of an experiment in order: text, tokens, model, encodings, memories, results, report."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import get_method
from omegaconf import DictConfig

from trime.common.io import plain
from trime.config.check import validate
from trime.config.schema import STAGES
from trime.errors import UserError
from trime.lab.provenance import command
from trime.lab.stage import RunOutcome, Stage, requested_stages
from trime.lab.storage import NEEDS, note_needs
from trime.lab.tracking import finishing_wandb_run
from trime.report.report_runs import check_report, report_several
from trime.report.results import find_runs, read_runs

log = logging.getLogger(__name__)

LOG = "log.txt"  # in a run's folder
OPEN_GRAPH = "trime.stages.preflight.open_graph"  # by name, for stages import from this room


def run(config: DictConfig) -> RunOutcome:
    """Run the configured stages, or with ``report.runs`` report finished runs; return the loss and the reported folders."""
    validate(config)
    stages, outcome = requested_stages(config), RunOutcome()
    of_experiment = [stage for stage in stages if not stage.standalone]
    if config.report.runs:
        report_finished_runs(config, [stage.name for stage in stages])
    elif of_experiment or not stages:
        outcome = run_experiment(config, of_experiment)
    for stage in stages:
        if stage.standalone:
            stage.standalone(config)
    return outcome


def run_experiment(config: DictConfig, stages: Sequence[Stage]) -> RunOutcome:
    """Check the configuration, then run an experiment's stages in order; on a further machine only its share."""
    graph = get_method(OPEN_GRAPH)(config)
    names = [stage.name for stage in stages]
    worker, has_log = graph.hardware.is_worker, any(stage.has_log for stage in stages)
    with finishing_wandb_run(), logging_to_file(graph.folder_of(names) / LOG if has_log and not worker else None):
        if worker:
            assist_training(graph, stages)
            log.info("this machine is done: the first one goes on alone (engine=ray shares the other stages)")
            return RunOutcome()
        artefacts = [artefact for stage in stages if stage.kept_by_prune for artefact in stage.artefacts(graph)]
        missing = [artefact for artefact in artefacts if not artefact.folder.is_dir()]
        if artefacts:
            note_needs(graph.folder_of(names), [artefact.name for artefact in artefacts])
        outcome = RunOutcome(made=bool(missing))
        for stage in stages:
            outcome = outcome.then(run_stage(graph, stage))
        for finished in outcome.folders:
            (finished / NEEDS).unlink(missing_ok=True)  # results.json says it from now on
    return outcome


def run_stage(graph: Any, stage: Stage) -> RunOutcome:
    """Make the artefacts of a stage that do not exist, and log which were made; return the stage's outcome."""
    stage.check(graph)
    for artefact in stage.artefacts(graph):
        made = artefact.make()
        log.info(f"{stage.name}: {'made' if made else 'found'} {os.path.relpath(artefact.folder)}")
    outcome = stage.report(graph)
    return outcome if isinstance(outcome, RunOutcome) else RunOutcome()


def assist_training(graph: Any, stages: Sequence[Stage]) -> None:
    """Do a further machine's share of the stages as far as training, and of the training, if there is one."""
    (training,) = [number for number, stage in enumerate(stages) if stage.name == "fit"] or [0]
    for stage in stages[:training]:
        run_stage(graph, stage)
    if stages and stages[training].name == "fit" and stages[training].artefacts(graph):
        stages[training].check(graph)
        graph.fit.join_training()


@contextmanager
def logging_to_file(file: Path | None) -> Iterator[None]:
    """Append the messages of this package to a file too, with time and level; do nothing if there is no file."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("trime")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def report_finished_runs(config: DictConfig, stages: list[str]) -> None:
    """Report the runs that ``report.runs`` matches; UserError if other stages than ``report`` are asked for as well."""
    if stages not in (["report"], STAGES):
        raise UserError(f"stages=[{','.join(stages)}]: report.runs reports finished runs only; set stages=[report]")
    patterns = plain(config.report.runs)
    patterns = patterns if isinstance(patterns, list) else [patterns]
    check_report(config)
    runs = find_runs(patterns)
    if not runs:
        raise UserError(f"report.runs={', '.join(patterns)} matches no results of a run: name folders or files of results")
    report_several(config, runs, command())


def report_sweep(config: DictConfig, folders: list[Path], command: str, several: bool = False) -> None:
    """Report all runs of a sweep and its command together; a single run only if it is to be kept.

    ``several``: the command had several jobs, which printed no tables, even if only one of them finished.
    """
    if len(set(folders)) > 1 or (folders and (several or config.report.keep)):
        report_several(config, read_runs(folder / "results.json" for folder in folders), command)
