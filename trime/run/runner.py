"""Runs the stages of an experiment in order: text, tokens, model, encodings, memories, figures."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, ListConfig

from trime.inspection.audit import audit
from trime.inspection.generate import generate
from trime.inspection.ledger import write_ledger
from trime.io import plain
from trime.kernels.cpu import prepare_cpu
from trime.pipeline.kinds import demand
from trime.pipeline.pretrained import provide
from trime.pipeline.processes import device_of, follows
from trime.pipeline.settings import REPORT
from trime.pipeline.tracking import closing
from trime.plan.by_task import plan_of
from trime.report.several import report_several
from trime.run.checks import check
from trime.run.log_results import log_results
from trime.run.reporting import report_answers, report_replay, report_run
from trime.types import UserError

STAGES = ("import", "prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate", "report")
BEFORE_TRAINING = ("import", "prepare", "pack")
BY_NAME = ("initialize", "teach", "answer", "generate", "record", "replay", "audit", "ledger")  # these run when they are named


class RunOutcome(NamedTuple):
    """Loss on dev of the experiment's own row in nats, which sweeps minimise, and the folders of the runs reported."""

    loss: float | None = None
    folders: tuple[Path, ...] = ()


def report_sweep(config: DictConfig, folders: list[Path]) -> None:
    """Write one table, picture and page of all runs of a sweep; of one run if it is to be kept or has a frontier."""
    if len(set(folders)) > 1 or (folders and (config.report.keep or config.evaluate.subsets == "all")):
        report_several(config, [glob.escape(str(folder)) for folder in dict.fromkeys(folders)])


def run(config: DictConfig) -> RunOutcome:
    """Make what is missing, then report."""
    if not isinstance(config.stages, ListConfig):
        raise UserError(f"stages={config.stages}: it must be a list, as in stages=[fit,report]")
    unknown = [stage for stage in config.stages if stage not in (*STAGES, *BY_NAME)]
    if unknown:
        raise UserError(f"there is no stage {unknown[0]}: choose stages from {', '.join((*STAGES, *BY_NAME))}")
    if config.report.runs:
        demand(config, REPORT)
        patterns = plain(config.report.runs)
        patterns = patterns if isinstance(patterns, list) else [patterns]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"report.runs={config.report.runs}: it must be a pattern of run folders, or a list of them")
        report_several(config, patterns)
        return RunOutcome()
    if "ledger" in config.stages:
        write_ledger(config)
        return RunOutcome()
    provide(config)
    check(config)
    if device_of(config).type == "cpu":
        prepare_cpu()
    plan, outcome = plan_of(config), RunOutcome()
    with closing(plan):
        for stage in (stage for stage in (*STAGES, *BY_NAME) if stage in config.stages):
            if follows(config) and stage not in BEFORE_TRAINING:
                if stage == "fit" and not config.checkpoint:
                    plan.check_text()
                    plan.fit.take_part()
                print("the first machine goes on alone")
                return outcome
            if stage == "audit":
                audit(plan)
                continue
            if stage == "generate":
                generate(plan)
                continue
            if stage == "report":
                results, samples = report_run(plan)
                log_results(plan.logger, results, samples, plan.run_folder)
                outcome = RunOutcome(results["metrics"]["valid"][-1]["loss"], (*outcome.folders, plan.run_folder))
                continue
            if stage == "fit":
                plan.check_text()
            for artefact in plan.made_by(stage):
                made = artefact.make()
                print(f"{stage}: {'made' if made else 'found'} {os.path.relpath(artefact.folder)}", flush=True)
            if stage == "replay":
                report_replay(plan)
            if stage == "answer":
                outcome = outcome._replace(folders=(*outcome.folders, report_answers(plan)))
    return outcome
