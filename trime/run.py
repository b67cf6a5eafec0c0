"""Runs the stages that an experiment needs, in order: the way of the data in one page."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import DictConfig

from trime.stages.artefact import Artefact
from trime.stages.datastore import Index, uses_external
from trime.stages.encode import Encode
from trime.stages.evaluate import Evaluate
from trime.stages.fit import Fit
from trime.stages.pack import Pack
from trime.stages.prepare import Prepare
from trime.stages.report import report_run, report_several, run_folder
from trime.stages.tune import Tune
from trime.stages.tracking import tracked
from trime.types import UserError

STAGES = ("prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate", "report")


def artefacts(config: DictConfig, stage: str) -> list[Artefact]:
    """What a stage makes for this experiment."""
    external = uses_external(config)
    if stage == "prepare":
        sections = [s for s in ("evaluate", "datastore") if config[s].get("dataset")]
        return [Prepare(config), *(Prepare(config, section) for section in sections)]
    if stage == "pack":
        return [Pack(config)] if config.batching._target_.endswith("BM25") else []
    if stage == "fit":
        return [] if config.checkpoint else [Fit(config)]
    if stage == "encode":
        own_store = external and not config.datastore.path
        store = [Encode(config, "datastore", config.datastore.split)] if own_store else []
        return [Encode(config, "evaluate", "valid"), *store]
    if stage == "datastore":
        return [Index(config)] if external else []
    if stage == "tune":
        return [Tune(config)]
    return [Encode(config, "evaluate", "test"), Evaluate(config)]


def run(config: DictConfig) -> float | None:
    """Makes what is missing, then reports; returns the own row's test loss, for sweeps."""
    unknown = [stage for stage in config.stages if stage not in STAGES]
    if unknown:
        raise UserError(f"stages={list(config.stages)}: there is no stage {unknown[0]}; choose from {', '.join(STAGES)}")
    if config.report.runs:
        report_several(config)
        return None
    results: dict[str, Any] | None = None
    with tracked(config, run_folder) as tracker:
        for stage in (stage for stage in STAGES if stage in config.stages):
            if stage == "report":
                results = report_run(config)
                tracker.finish(results)
                continue
            for artefact in artefacts(config, stage):
                made = artefact.make()
                print(f"{stage}: {'made' if made else 'found'} {os.path.relpath(artefact.folder)}", flush=True)
    return results["metrics"]["test"][-1]["loss"] if results else None
