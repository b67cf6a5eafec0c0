"""Run the stages of an experiment in order: text, tokens, model, encodings, memories, results, report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from trime.common.cpu import prepare_cpu
from trime.common.io import plain
from trime.config.check import validate
from trime.config.compose import command_of
from trime.config.schema import STAGES
from trime.errors import UserError
from trime.lab.baseline import baseline_overrides
from trime.lab.log_results import log_once
from trime.lab.provenance import command
from trime.lab.storage import NEEDS, STORAGE_STAGES, note_needs
from trime.lab.tracking import finishing_wandb_run
from trime.report.report_runs import check_report, report_several
from trime.report.results import find_runs, read_runs
from trime.stages.audit import audit
from trime.stages.export import export
from trime.stages.generate import generate
from trime.stages.graph import Plan
from trime.stages.graphs import build_plan
from trime.stages.ledger import write_ledger
from trime.stages.preflight import check
from trime.stages.pretrained import ensure_model_folder
from trime.stages.report import report_answers, report_replay, report_run
from trime.training.processes import device_of, is_worker

log = logging.getLogger(__name__)

LOG = "log.txt"  # in a run's folder
BEFORE_TRAINING = ("import", "prepare", "pack")
# Stages about all runs, which need no text.
HOUSEKEEPING: dict[str, Callable[[DictConfig], object]] = {
    "ledger": write_ledger,
    **STORAGE_STAGES,
}
# Stages that run only when they are named.
OPTIONAL_STAGES = (
    "init_small",
    "train_small",
    "answer",
    "generate",
    "record",
    "replay",
    "audit",
    "export",
    *HOUSEKEEPING,
)


class RunOutcome(NamedTuple):
    """Dev loss of the experiment's own row in nats, which sweeps minimise, and the folders of the reported runs.

    ``made``: whether anything was made; else the run was complete already.
    """

    loss: float | None = None
    folders: tuple[Path, ...] = ()
    made: bool = False


def report_sweep(config: DictConfig, folders: list[Path], command: str) -> None:
    """Report all runs of a sweep and its command together; a single run only if it is to be kept or has a frontier."""
    if len(set(folders)) > 1 or (folders and (config.report.keep or config.evaluate.subsets == "all")):
        check_report(config)
        report_several(config, read_runs(folder / "results.json" for folder in folders), command)


def run(config: DictConfig) -> RunOutcome:
    """Run the configured stages, or with ``report.runs`` report finished runs; return the loss and the reported folders."""
    validate(config)
    stages, outcome = requested_stages(config), RunOutcome()
    stages_of_run = [stage for stage in stages if stage not in HOUSEKEEPING]
    if config.report.runs:
        report_finished_runs(config, stages)
    elif stages_of_run or not stages:
        baseline = baseline_overrides(config) if config.report.baseline and "report" in stages else []
        outcome = run_experiment(config, stages_of_run)
        if baseline:
            with command_of(*baseline) as other:
                compared = run_experiment(other, stages_of_run)
                folders, made = (*outcome.folders, *compared.folders), outcome.made or compared.made
                outcome = outcome._replace(folders=folders, made=made)
    for stage in stages:
        if stage in HOUSEKEEPING:
            HOUSEKEEPING[stage](config)
    return outcome


def requested_stages(config: DictConfig) -> list[str]:
    """Return the configured stages in the order in which they run; UserError if one does not exist.

    A trial of a search does not score test: it neither evaluates nor reports.
    """
    known = (*STAGES, *OPTIONAL_STAGES)
    unknown = [stage for stage in config.stages if stage not in known]
    if unknown:
        raise UserError(f"there is no stage {unknown[0]}: choose stages from {', '.join(known)}")
    left_out = ("evaluate", "report") if config.search else ()
    return [stage for stage in known if stage in config.stages and stage not in left_out]


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


def run_experiment(config: DictConfig, stages: list[str]) -> RunOutcome:
    """Check the configuration, then run an experiment's stages in order; on a further machine only its share."""
    ensure_model_folder(config)
    check(config)
    if device_of(config).type == "cpu":
        prepare_cpu()
    plan, outcome = build_plan(config), RunOutcome()
    with finishing_wandb_run(), logging_to_file(log_file(plan, stages)):
        if is_worker(config):
            assist_training(plan, stages)
            log.info("this machine is done: the first one goes on alone (engine=ray shares the other stages)")
            return outcome
        artefacts = [artefact for stage in stages if stage != "init_small" for artefact in plan.made_by(stage)]
        missing = [artefact for artefact in artefacts if not artefact.folder.is_dir()]
        if artefacts:
            note_needs(results_folder(plan, stages), [artefact.name for artefact in artefacts])
        for stage in stages:
            outcome = run_stage(plan, stage, outcome)
        if {"report", "answer"} & {*stages}:
            (results_folder(plan, stages) / NEEDS).unlink(missing_ok=True)  # results.json says it from now on
    return outcome._replace(made=bool(missing))


def results_folder(plan: Plan, stages: list[str]) -> Path:
    """Return the folder of the results of these stages."""
    return plan.answers_folder if {"train_small", "answer"} & {*stages} else plan.run_folder


def log_file(plan: Plan, stages: list[str]) -> Path | None:
    """Return the file of a run's messages, in the folder of its results; None for stages that write no results."""
    writes = {"answer", "evaluate", "replay", "report"} & {*stages} and not is_worker(plan.config)
    return results_folder(plan, stages) / LOG if writes else None


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


def assist_training(plan: Plan, stages: list[str]) -> None:
    """Do a further machine's share of the stages before training, and of the training."""
    for stage in stages:
        if stage in BEFORE_TRAINING:
            make_artefacts(plan, stage)
    if "fit" in stages and not plan.config.checkpoint:
        plan.check_text()
        plan.fit.join_training()


def run_stage(plan: Plan, stage: str, outcome: RunOutcome) -> RunOutcome:
    """Run one stage; return the outcome so far, with what the stage added to it."""
    match stage:
        case "audit":
            audit(plan)
        case "generate":
            generate(plan)
        case "export":
            export(plan)
        case "report":
            report = report_run(plan)
            log_once(lambda: plan.loggers, plain(plan.config.logger), plan.run_folder, *report)
            return RunOutcome(report.results.dev.loss, (*outcome.folders, plan.run_folder))
        case "prepare":
            make_artefacts(plan, stage)
            for note in plan.duplicates:
                log.warning(f"note: {note}")
        case "fit":
            plan.check_text()
            make_artefacts(plan, stage)
        case "replay":
            make_artefacts(plan, stage)
            report_replay(plan)
        case "answer":
            make_artefacts(plan, stage)
            return outcome._replace(folders=(*outcome.folders, report_answers(plan)))
        case "tune":
            make_artefacts(plan, stage)
            return outcome._replace(loss=plan.tune.tuned()["rows"][-1]["loss"])
        case _:
            make_artefacts(plan, stage)
    return outcome


def make_artefacts(plan: Plan, stage: str) -> None:
    """Make what a stage is to make, unless it exists already; log which of the two it was."""
    for artefact in plan.made_by(stage):
        made = artefact.make()
        log.info(f"{stage}: {'made' if made else 'found'} {os.path.relpath(artefact.folder)}")
