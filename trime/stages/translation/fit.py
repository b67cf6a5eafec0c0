"""The way of parallel text: fit on sentence pairs, K by BLEU on valid, test once (TRIME section 5.4, Appendix C)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trime.data.module import TextModule, in_order
from trime.data.segments import count_of
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row
from trime.models.network import Network, build_network
from trime.pipeline.artefact import Artefact, plain
from trime.pipeline.model_io import describe, model_of
from trime.pipeline.processes import share_of
from trime.pipeline.rows import rows_of
from trime.plan.language_model import Plan
from trime.stages.datastore import Index, uses_external
from trime.stages.encode import Encode
from trime.stages.evaluate import Evaluate
from trime.stages.fit import Fit
from trime.stages.memories import Memories, Sources
from trime.stages.mixture import tune_of
from trime.stages.pack import Pack
from trime.stages.translation.bleu_validation import BleuValidation
from trime.stages.translation.import_checkpoint import Dictionaries, ImportTranslation
from trime.stages.translation.pairs import (
    EncodePairs,
    PackSentences,
    PairLoader,
    PairWindows,
    ParallelCorpus,
    PreparePairs,
    first_sentences,
    sentence_segments,
)
from trime.stages.translation.translate import Translate
from trime.stages.tune import Tune
from trime.tasks.callbacks.checkpoints import BestWeights
from trime.tasks.translation import Translation
from trime.types import UserError


class FitTranslation(Fit):
    """The trained translation model."""

    def settings(self) -> Any:
        asked = plain(self.config.translation)
        search = {name: asked[name] for name in ("beam", "penalty", "shortest", "longest", "sentences")}
        return super().settings() | {"smoothing": asked["smoothing"]} | ({"best_by": search} if self.by_bleu else {})

    @property
    def by_bleu(self) -> bool:
        """The best validation is the one whose translations have the highest BLEU."""
        return self.config.train.keep == "best" and self.config.translation.best_by == "bleu"

    def watching(self, folder: Path, network: Network) -> list[pl.Callback]:
        corpus = self.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        return [*super().watching(folder, network), *([BleuValidation(corpus, self.config)] if self.by_bleu else [])]

    def best_weights(self, folder: Path) -> BestWeights:
        return BestWeights(folder, "valid/bleu", highest=True) if self.by_bleu else super().best_weights(folder)

    def network(self, corpus: Any) -> Network:
        return build_network(OmegaConf.create(self.model(corpus)), len(corpus.vocabulary))

    def model(self, corpus: ParallelCorpus) -> dict[str, Any]:
        """Return the description of the model, with a table for the source language where it has a dictionary of its own."""
        model = model_of(self.config)
        if not self.config.translation.joined_dictionary:
            model["backbone"]["source_vocabulary"] = len(corpus.sources.vocabulary)
        return model

    def describe(self, folder: Path, corpus: Any, trained: dict[str, Any]) -> None:
        describe(folder, self.model(corpus), corpus.vocabulary, trained, source=corpus.sources.vocabulary)

    def data(self, corpus: Any, carries: bool) -> TextModule:
        """Training batches in planned order, and the first sentences of the validation split."""
        config, share = self.config, share_of(self.config)
        batching = instantiate(config.batching, _convert_="all")
        text, valid, ends = corpus.split("train"), corpus.split("valid"), corpus.vocabulary.ends
        neighbours, steps = self.pack.neighbours() if self.pack else None, config.train.updates * config.train.accumulate
        loader = PairLoader(corpus, text, sentence_segments(text), batching, neighbours, steps, ends, share)
        held = first_sentences(valid, count_of(config.train.validate_tokens))
        size = max(1, batching.tokens // int(held.length.max()))
        return TextModule(loader, PairWindows(corpus, "valid", held, in_order(held, size), share))

    def task(self, network: Network) -> Translation:
        own = super().task(network)
        given = (own.memory, own.training_, own.optimizer_factory, own.schedule)
        return Translation(network, *given, smoothing=self.config.translation.smoothing)


class TuneByBleu(Tune):
    """``tuned.json``: every row with a memory at the K whose translations of valid have the highest BLEU.

    ``plain`` has the translations of the rows without memory, which come first; ``own`` those of the others at each K, where
    each has its own best temperatures, or its own fitted mixture.
    """

    kind, stage, format = "tune_bleu", "tune", 2

    def __init__(self, config: DictConfig, tunes: dict[int, Tune], plain: Translate, own: dict[int, Translate]):
        first = next(iter(tunes.values()))
        super().__init__(config, first.encoded, first.memories)
        self.tunes, self.plain, self.own = tunes, plain, own

    def needs(self) -> list[Artefact]:
        return [*self.tunes.values(), self.plain, *self.own.values()]

    def parts(self) -> list[Artefact]:
        return [*(part for tune in self.tunes.values() for part in (*tune.parts(), tune)), self.plain, *self.own.values()]

    def settings(self) -> Any:
        return list(self.tunes)

    def build(self, folder: Path) -> None:
        rows, first = self.plain.found(), next(iter(self.tunes.values()))
        content = first.tuned() | {"k": [None for _ in rows]}
        content["rows"] = [row | scored for row, scored in zip(content["rows"], rows, strict=False)]
        for number in range(len(next(iter(self.own.values())).found())):
            found = {k: own.found()[number] for k, own in self.own.items()}
            best = max(found, key=lambda k: found[k]["bleu"])
            row = self.tunes[best].tuned()["rows"][len(rows) + number] | found[best]
            row["tuned"]["k"] = best
            content["rows"].append(row | {"bleu_by_k": {str(k): own["bleu"] for k, own in found.items()}})
            content |= {"recall": self.tunes[best].tuned()["recall"]}
            content["k"].append(best)
            if len(found) > 2 and best in (min(found), max(found)):
                print(f"tune: {row['memories']}: K={best} lies at the edge of the grid: widen translation.k")
        (folder / "tuned.json").write_text(json.dumps(content, indent=1))

    def of(self, row: int) -> Tune:
        """Return the pass at the row's best K."""
        k = self.tuned()["k"][row]
        return next(iter(self.tunes.values())) if k is None else self.tunes[k]

    def rows(self) -> Sequence[Row | FittedRow]:
        return [self.of(number).rows()[number] for number in range(len(self.tuned()["rows"]))]


class EvaluatePairs(Evaluate):
    """``rows.json``: loss and BLEU of every row on test."""

    def __init__(self, config: DictConfig, encoded: Encode, tune: TuneByBleu, translate: Translate):
        super().__init__(config, encoded, tune)
        self.translate = translate

    def needs(self) -> list[Artefact]:
        return [*super().needs(), self.translate]

    def build(self, folder: Path) -> None:
        super().build(folder)
        rows = json.loads((folder / "rows.json").read_text())
        found = [row | scored for row, scored in zip(rows, self.translate.found(), strict=True)]
        for row in found:
            row["tuned"] |= {"k": row["k"]} if row["k"] else {}
        (folder / "rows.json").write_text(json.dumps(found, indent=1))

    def rows(self) -> list[dict[str, Any]]:
        """Every row with what a paired bootstrap of BLEU wants."""
        return [row | {"bleu_statistics": self.translate.statistics(n)} for n, row in enumerate(super().rows())]


class TranslationPlan(Plan):
    """The same way for parallel text."""

    encoder = EncodePairs

    importer = ImportTranslation

    @cached_property
    def corpus(self) -> PreparePairs:
        return PreparePairs(self.config, self.config.dataset, self.dictionaries)

    @cached_property
    def dictionaries(self) -> Dictionaries | None:
        """The dictionaries of an imported model, in which all text is read."""
        if not self.config.checkpoint:
            return None
        model = self.model
        return model.dictionaries if isinstance(model, ImportTranslation) else Dictionaries.of_folder(model.folder)

    @cached_property
    def pack(self) -> Pack | None:
        wanted = instantiate(self.config.batching, _convert_="all").needs_neighbours and not self.config.checkpoint
        return PackSentences(self.config, self.corpus) if wanted else None

    @cached_property
    def fit(self) -> Fit:
        return FitTranslation(self.config, self.corpus, self.pack, lambda: self.logger)

    @cached_property
    def tune(self) -> TuneByBleu:
        ks = plain(self.config.translation.k) if uses_external(self.config) else [self.config.index.k]
        tunes = {k: self.tuned_at(k) for k in ks}
        rows = rows_of(self.config)
        first = next((number for number, row in enumerate(rows) if row.memories), len(rows))
        own = {k: Translate(self.config, self.valid, tune, slice(first, None)) for k, tune in tunes.items()}
        return TuneByBleu(self.config, tunes, Translate(self.config, self.valid, tunes[ks[0]], slice(0, first)), own)

    def tuned_at(self, k: int) -> Tune:
        """Temperatures and share at K entries."""
        config: DictConfig = OmegaConf.merge(self.config, {"index": {"k": k}})  # type: ignore[assignment]
        index = Index(config, self.store) if uses_external(config) else None
        return tune_of(config, self.valid, Memories(config, Sources(index, self.corpus)))

    @cached_property
    def evaluate(self) -> EvaluatePairs:
        return EvaluatePairs(self.config, self.test, self.tune, Translate(self.config, self.test, self.tune))

    @property
    def most_neighbours(self) -> int:
        return max(self.config.translation.k)

    def check_windows(self) -> None:
        """UserError where a sentence has more pieces than the model allows."""
        positions, corpus = self.config.model.backbone.positions, self.corpus.corpus()
        for split in corpus.statistics["splits"]:
            for side in (corpus, corpus.sources):
                longest = int(side.split(split).lengths.max())
                if longest >= positions:
                    raise UserError(
                        f"split {split} has a sentence of {longest} pieces: raise model.backbone.positions={positions}"
                    )

    def made_by(self, stage: str) -> list[Artefact]:
        if stage == "tune":
            return [*self.tune.parts(), self.tune]
        if stage == "evaluate":
            return [self.test, self.evaluate.translate, self.evaluate]
        return super().made_by(stage)
