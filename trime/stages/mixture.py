"""mixture: fits the mixture of an experiment's memories on what tune's pass over valid found, by documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trime.data.corpus import content_hash
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row
from trime.io import plain
from trime.metrics import ResourceUsage
from trime.mixtures.experts import Evidence, History, Mixture, log_mixture
from trime.pipeline.artefact import Artefact
from trime.stages.encode import Encode
from trime.stages.memories import Memories
from trime.stages.tune import PART_TOKENS, LossSums, Tune, summarize_row
from trime.types import Float, Int, Tensor, UserError

BLOCKS = 4  # of a fold, where there are fewer documents than folds


class TuneMixture(Tune):
    """``mixture.safetensors`` and ``mixture.json``, a few kilobytes; the grid's own settings are those of ``grid``."""

    kind, stage, format = "mixture", "tune", 2

    def __init__(self, config: DictConfig, grid: Tune):
        super().__init__(config, grid.encoded, grid.memories)
        self.grid = grid

    def needs(self) -> list[Artefact]:
        return [self.grid]

    def parts(self) -> list[Artefact]:
        return [self.grid]

    def settings(self) -> Any:
        given = given_mixture(self.config)
        kept = {key: value for key, value in plain(self.config.mixture).items() if key != "path"}
        content = given and [content_hash(given.with_name(name)) for name in (given.name, "mixture.safetensors")]
        return {"mixture": kept, "seed": self.config.seed, "given": content}

    def build(self, folder: Path) -> None:
        row, meter = self.row(), ResourceUsage()
        evidence, described = self.grid.evidence()
        given = given_mixture(self.config)
        if given:
            mixture = mixture_of(self.config, described["experts"])
            mixture.load(opened(given, described["experts"], row, mixture))
            score = scored(mixture, evidence)
        else:
            mixture, score = fitted(self.config, evidence, described)
        found = summarize_row(row, sum_by_document(evidence.document, -score))
        found |= {"at_edge": [], "fitted": mixture.describe(), "by_memory_size": {}}  # of one size there is no curve
        save_file(mixture.state(), folder / "mixture.safetensors")
        content = {"row": found, "crossfitted": not given, "seconds": round(meter.seconds, 1), **described}
        content |= {"kind": row.kind, "temperatures": row.temperatures, "history": mixture.decays}
        (folder / "mixture.json").write_text(json.dumps(content, indent=1))

    def row(self) -> FittedRow:
        """Return the row, not fitted."""
        (found,) = self.fitted()
        return found

    def information(self) -> dict[str, Any]:
        return self.read("mixture.json")

    def tuned(self) -> dict[str, Any]:
        tuned = self.grid.tuned()
        return tuned | {"rows": [*tuned["rows"], self.information()["row"]]}

    def rows(self) -> list[Row | FittedRow]:
        mixture = mixture_of(self.config, self.information()["experts"])
        mixture.load(load_file(self.path() / "mixture.safetensors"))
        return [*self.grid.rows(), replace(self.row(), fitted=mixture)]


def tune_of(config: DictConfig, encoded: Encode, memories: Memories) -> Tune:
    """Return what tunes the rows of an experiment, and fits its mixture where that is to be fitted."""
    grid = Tune(config, encoded, memories)
    return TuneMixture(config, grid) if grid.fitted() else grid


def given_mixture(config: DictConfig) -> Path | None:
    """Return the description of the mixture that ``mixture.path=`` names."""
    if not config.mixture.get("path"):
        return None
    file = Path(config.mixture.path).expanduser() / "mixture.json"
    if not (file.is_file() and file.with_name("mixture.safetensors").is_file()):
        raise UserError(f"mixture.path={config.mixture.path} is no mixture: name a folder mixture-… of a run")
    return file


def opened(file: Path, experts: dict[str, int], row: FittedRow, mixture: Mixture) -> dict[str, Tensor]:
    """Return what was fitted elsewhere; UserError where it is another mixture, or of other memories."""
    try:
        own = json.loads(file.read_text())
        kept = own["kind"], [*own["experts"].items()], tuple(own["temperatures"]), tuple(own["history"])
        state = load_file(file.with_name("mixture.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"mixture.path={file.parent} is not whole or not of this version ({error}): fit it anew") from None
    if kept != (row.kind, [*experts.items()], row.temperatures, mixture.decays):
        said = ", ".join(f"{name} ({size} experts)" for name, size in own["experts"].items())
        raise UserError(
            f"mixture.path={file.parent} is {own['kind']}, of {said}, temperatures {own['temperatures']}, history "
            f"{own['history']}: set the same here, or fit anew"
        )
    return state


def mixture_of(config: DictConfig, experts: dict[str, int]) -> Mixture:
    """Return the mixture that the configuration describes, not fitted."""
    mixture = instantiate(config.mixture.model, _convert_="all")
    mixture.memories = experts
    return mixture


def fitted(config: DictConfig, evidence: Evidence, described: dict[str, Any]) -> tuple[Mixture, Float[Tensor, " n"]]:
    """Fit a mixture; return it, and log P of each token by one that did not see the token's fold."""
    mixture = mixture_of(config, described["experts"])
    fold = folds(evidence.document, config.mixture.folds, config.seed)
    return mixture, mixture.fit(evidence, fold, described["counts"], config.seed)


def folds(document: Int[Tensor, " n"], count: int, seed: int) -> Int[Tensor, " n"]:
    """Return the fold of each token: documents dealt out by their size; of few documents, blocks of the text in turn."""
    number, size = document.unique(return_inverse=True, return_counts=True)[1:]
    if len(size) < count:
        block = max(1, -(-len(document) // (count * BLOCKS)))
        return torch.arange(len(document)) // block % count
    held, fold = [0] * count, torch.empty(len(size), dtype=torch.long)
    drawn = torch.randperm(len(size), generator=torch.Generator().manual_seed(seed))
    for one in drawn[size[drawn].argsort(descending=True, stable=True)].tolist():
        fold[one] = held.index(min(held))
        held[int(fold[one])] += int(size[one])
    return fold[number]


def scored(mixture: Mixture, evidence: Evidence) -> Float[Tensor, " n"]:
    """Return log P of each token by a fitted mixture."""
    history = History(mixture.decays).text_features(evidence)
    with torch.no_grad():
        return log_mixture(mixture.log_weights(evidence.total, history), evidence.log_probability)


def sum_by_document(document: Int[Tensor, " n"], loss: Float[Tensor, " n"]) -> LossSums:
    """Return losses summed by document, or by parts of few."""
    sums, start = LossSums(), 0
    for number, size in zip(*(part.tolist() for part in document.unique_consecutive(return_counts=True)), strict=True):
        for part, first in enumerate(range(start, start + size, PART_TOKENS)):
            own = loss[first : min(first + PART_TOKENS, start + size)]
            sums.documents.add(number)
            sums.put((number, part), own.double().sum()[None, None], len(own))
        start += size
    return sums
