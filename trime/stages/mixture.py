"""Artefact of stage tune: the mixture of an experiment's memories, fitted to valid and cross-fitted by document."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage
from trime.common.parts import build
from trime.common.types import Float, Int, Tensor
from trime.common.urls import local_copy
from trime.data.corpus import content_hash
from trime.errors import UserError
from trime.lab.artefact import Lab
from trime.lab.manifest import check_manifest
from trime.scoring.loss_sums import PART_TOKENS, LossSums, summarize_row
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.mixtures.experts import ExpertMasses, History, Mixture, folds, log_mixture
from trime.stages.encode import Encode
from trime.stages.memories import Memories
from trime.stages.tune import Tune, TunedRows


@dataclass(frozen=True)
class MixtureSettings:
    """The section ``mixture`` as far as it decides what is fitted to given masses."""

    model: dict[str, Any]
    folds: int
    seed: int

    def build(self, experts: dict[str, int]) -> Mixture:
        """Return the mixture, not fitted; ``experts``: how many each memory has."""
        mixture = build(self.model)
        mixture.memories = experts
        return mixture

    def fit(self, masses: ExpertMasses, description: dict[str, Any]) -> tuple[Mixture, Float[Tensor, " n"]]:
        """Fit a mixture; return it, and log P of each token by a mixture fitted without the token's fold."""
        mixture, fold = self.build(description["experts"]), folds(masses.document, self.folds, self.seed)
        return mixture, mixture.fit(masses, fold, description["counts"], self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class TuneMixture(TunedRows):
    """The fitted mixture: ``mixture.safetensors`` and ``mixture.json``; rows with a grid have the settings of ``grid``."""

    kind, stage, format = "mixture", "tune", 5
    summary_file = "mixture.json"

    grid: Tune
    mixture: MixtureSettings
    given: Free[Path | None]  # mixture.json of a mixture that is taken instead of fitting one; identity() has its content
    lab: Free[Lab]

    @property
    def encoded(self) -> Encode:  # type: ignore[override]
        return self.grid.encoded

    @property
    def memories(self) -> Memories:  # type: ignore[override]
        return self.grid.memories

    def identity(self) -> Any:
        files = [self.given.with_name(name) for name in (self.given.name, "mixture.safetensors")] if self.given else []
        return super().identity() | {"given": [*map(content_hash, files)]}

    def build(self, folder: Path) -> None:
        row, meter = self.row(), ResourceUsage()
        masses, description = self.grid.expert_masses()
        if self.given:
            mixture = self.mixture.build(description["experts"])
            mixture.load(read_mixture(self.given, description["experts"], row, mixture))
            score = score_tokens(mixture, masses)
        else:
            mixture, score = self.mixture.fit(masses, description)
        result = summarize_row(row, sum_by_document(masses.document, -score))
        result |= {"at_grid_edge": [], "fitted": mixture.describe(), "by_memory_size": {}}  # one size makes no curve
        write_tensors(folder / "mixture.safetensors", mixture.state())
        content = {"row": result, "crossfitted": not self.given, "seconds": round(meter.seconds, 1), **description}
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
        mixture = self.mixture.build(self.summary()["experts"])
        mixture.load(load_file(self.path() / "mixture.safetensors"))
        return [*self.grid.rows(), replace(self.row(), fitted=mixture)]


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
        stored = json.loads(file.read_text(encoding="utf-8"))
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
