"""Artefact of stage tune: the mixture of an experiment's memories, fitted to valid and cross-fitted by document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage
from trime.common.types import Float, Int, Tensor
from trime.common.urls import local_copy
from trime.data.corpus import content_hash
from trime.errors import UserError
from trime.lab.artefact import Artefact
from trime.lab.manifest import check_manifest
from trime.lab.parts import RunParts
from trime.scoring.fitted_mixture_spec import FittedMixtureSpec
from trime.scoring.loss_sums import PART_TOKENS, LossSums, summarize_row
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.mixtures.experts import ExpertMasses, History, Mixture, folds, log_mixture
from trime.scoring.rows import MixtureSpecs
from trime.stages.encode import Encode
from trime.stages.memories import Memories
from trime.stages.tune import Tune, TunedRows


class TuneMixture(TunedRows):
    """The fitted mixture: ``mixture.safetensors`` and ``mixture.json``; rows with a grid have the settings of ``grid``."""

    kind, stage, format = "mixture", "tune", 4
    summary_file = "mixture.json"
    depends_on, unhashed = ("mixture", "seed"), ("mixture.path",)

    def __init__(self, config: DictConfig, grid: Tune):
        super().__init__(config, grid.encoded, grid.memories)
        self.grid = grid

    def needs(self) -> list[Artefact]:
        return [self.grid]

    def settings(self) -> Any:
        given = given_mixture(self.config)
        content = given and [content_hash(given.with_name(name)) for name in (given.name, "mixture.safetensors")]
        return super().settings() | {"given": content}

    def build(self, folder: Path) -> None:
        row, meter = self.row(), ResourceUsage()
        masses, description = self.grid.expert_masses()
        given = given_mixture(self.config)
        if given:
            mixture = build_mixture(self.config, description["experts"])
            mixture.load(read_mixture(given, description["experts"], row, mixture))
            score = score_tokens(mixture, masses)
        else:
            mixture, score = fit_mixture(self.config, masses, description)
        result = summarize_row(row, sum_by_document(masses.document, -score))
        result |= {"at_grid_edge": [], "fitted": mixture.describe(), "by_memory_size": {}}  # one size makes no curve
        write_tensors(folder / "mixture.safetensors", mixture.state())
        content = {"row": result, "crossfitted": not given, "seconds": round(meter.seconds, 1), **description}
        content |= {"kind": row.kind, "temperatures": row.temperatures, "history": mixture.decays}
        write_json(folder / "mixture.json", content)

    def row(self) -> FittedMixtureSpec:
        """Return the row of the mixture, not fitted."""
        row = self.grid.fitted_row
        assert row is not None
        return row

    def tuned(self) -> dict[str, Any]:
        tuned = self.grid.tuned()
        return tuned | {"rows": [*tuned["rows"], self.summary()["row"]]}

    def rows(self) -> list[MixtureSpec | FittedMixtureSpec]:
        mixture = build_mixture(self.config, self.summary()["experts"])
        mixture.load(load_file(self.path() / "mixture.safetensors"))
        return [*self.grid.rows(), replace(self.row(), fitted=mixture)]


def build_tune(config: DictConfig, table: MixtureSpecs, encoded: Encode, memories: Memories, run_parts: RunParts) -> TunedRows:
    """Return the artefact that tunes the rows of an experiment, and fits its mixture if it has one to be fitted."""
    grid = Tune(config, table, encoded, memories, run_parts)
    return TuneMixture(config, grid) if grid.fitted_row else grid


def given_mixture(config: DictConfig) -> Path | None:
    """Return the ``mixture.json`` of the mixture that ``mixture.path=`` names, if any; UserError if there is none."""
    if not config.mixture.get("path"):
        return None
    file, remedy = local_copy(config.mixture.path) / "mixture.json", "name a mixture-… folder of a run, or fit it anew"
    if not (file.is_file() and file.with_name("mixture.safetensors").is_file()):
        raise UserError(f"mixture.path={config.mixture.path} is not a mixture: {remedy}")
    check_manifest(file.parent, "mixture-.*", remedy, config.artefacts.verify)
    return file


def read_mixture(file: Path, experts: dict[str, int], row: FittedMixtureSpec, mixture: Mixture) -> dict[str, Tensor]:
    """Return the state of a mixture fitted elsewhere; UserError if it is another kind of mixture, or of other memories."""
    try:
        stored = json.loads(file.read_text())
        layout = stored["kind"], [*stored["experts"].items()], tuple(stored["temperatures"]), tuple(stored["history"])
        state = load_file(file.with_name("mixture.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"mixture.path={file.parent} is incomplete or of another version ({error}): fit it anew") from None
    if layout != (row.kind, [*experts.items()], row.temperatures, mixture.decays):
        memories = ", ".join(f"{name} ({size} experts)" for name, size in stored["experts"].items())
        raise UserError(
            f"mixture.path={file.parent} is {stored['kind']}, of {memories}, temperatures {stored['temperatures']}, history "
            f"{stored['history']}: use the same settings here, or fit it anew"
        )
    return state


def build_mixture(config: DictConfig, experts: dict[str, int]) -> Mixture:
    """Return the configured mixture, not fitted."""
    mixture = instantiate(config.mixture.model, _convert_="all")
    mixture.memories = experts
    return mixture


def fit_mixture(config: DictConfig, masses: ExpertMasses, description: dict[str, Any]) -> tuple[Mixture, Float[Tensor, " n"]]:
    """Fit a mixture; return it, and log P of each token by a mixture fitted without the token's fold."""
    mixture = build_mixture(config, description["experts"])
    fold = folds(masses.document, config.mixture.folds, config.seed)
    return mixture, mixture.fit(masses, fold, description["counts"], config.seed)


def score_tokens(mixture: Mixture, masses: ExpertMasses) -> Float[Tensor, " n"]:
    """Return log P of each token under a fitted mixture."""
    history = History(mixture.decays).text_features(masses)
    with torch.no_grad():
        return log_mixture(mixture.log_weights(masses.total, history), masses.log_probability)


def sum_by_document(document: Int[Tensor, " n"], loss: Float[Tensor, " n"]) -> LossSums:
    """Return the losses summed by document and part."""
    sums, start = LossSums(), 0
    for number, size in zip(*(part.tolist() for part in document.unique_consecutive(return_counts=True)), strict=True):
        for part, first in enumerate(range(start, start + size, PART_TOKENS)):
            part_loss = loss[first : min(first + PART_TOKENS, start + size)]
            sums.put((number, part), part_loss.double().sum()[None, None], len(part_loss))
        start += size
    return sums
