"""Artefacts of tune and evaluate: beam search over a split with a row's mixture at every step, and BLEU (Appendix C)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import read_json_lines, write_atomically, write_json
from trime.common.metrics import ResourceUsage, Usage
from trime.data.corpus import evenly_spaced
from trime.lab.artefact import Lab
from trime.lab.engines import Advance
from trime.lab.shards import ShardedArtefact, Work
from trime.models.network import Network
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.stages.encode import Encode
from trime.stages.evaluate import Evaluate, TestResults
from trime.stages.memories import Memories
from trime.stages.tune import TunedRows
from trime.translation.beam import SearchSettings, Translator
from trime.translation.pairs.corpus import ParallelCorpus

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Translate(ShardedArtefact):
    """Translations of a split by some rows of a table, in ``row-N.jsonl``, and their BLEU, in ``bleu.json``."""

    kind, format = "translate", 2
    summary_file = "bleu.json"

    encoded: Encode
    tune: TunedRows
    first: int  # the rows that translate, from the first to before the last; None: all others
    last: int | None
    search: SearchSettings
    lab: Free[Lab]

    @property
    def stage(self) -> str:
        return "evaluate" if self.encoded.split == "test" else "tune"

    @property
    def corpus(self) -> ParallelCorpus:
        """The parallel corpus whose sentences are translated."""
        corpus = self.encoded.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        return corpus

    @property
    def references(self) -> list[str]:
        """The reference translations of the sentences that are translated."""
        return self.corpus.references(self.encoded.split)[: self.search.sentences]

    def batches(self) -> list[tuple[int, int, int]]:
        """Return row, first and last of ``translation.batch_size`` sentences each, first all of one row.

        All batches of a row follow one another, because a row's translator is expensive to make.
        """
        count = len(self.references)
        edges = [*range(0, count, self.search.batch_size), count]
        rows = [*range(len(self.tune.rows()))][self.first : self.last]
        return [(row, low, high) for row in rows for low, high in pairwise(edges)]

    def work(self, folder: Path) -> Work:
        """Return the work on the translations of each batch."""
        batches, source = self.batches(), self.corpus.sources.split(self.encoded.split)
        files = [folder / f"part-{row}-{low:06d}-{high:06d}.json" for row, low, high in batches]
        opened: dict[int, Translator] = {}  # no more than one row's is kept, for each has its memories open

        def make(number: int, advance: Advance) -> None:
            row, low, high = batches[number]
            if row not in opened:
                opened.clear()
                opened[row] = self.translator(row)
            meter = ResourceUsage()
            (texts,) = opened[row].translate(source, low, high)
            write_json(files[number], {"texts": texts} | meter.note(), indent=None)
            advance(high - low)

        return Work(files, [high - low for _, low, high in batches], make)

    def build(self, folder: Path) -> None:
        work, references, results = self.work(folder), self.references, []
        self.make_shards(work, folder, f"translate {self.encoded.split}", "sentence")
        batches = zip(self.batches(), work.files, strict=True)
        for number, of_row in groupby(batches, key=lambda batch: batch[0][0]):
            contents, usage = [json.loads(file.read_text(encoding="utf-8")) for _, file in of_row], Usage()
            for content in contents:
                usage.add(content)
            texts = [text for content in contents for text in content["texts"]]
            lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
            write_atomically(folder / f"row-{number}.jsonl", lines)
            # Of just this row: its batches are timed apart from those of other rows.
            rate = round(len(texts) / usage.seconds, 1)
            results.append(score_translations(texts, references) | {"sentences_per_second": rate})
        write_json(folder / "bleu.json", {"rows": results})

    def translator(self, number: int) -> Translator:
        """Return the translator of the split by a row of the table, with the settings tuned for it."""
        row = self.tune.rows()[number]
        memories = self.tune.for_row(number).memories.open_all(self.encoded.summary(), [], row.memories)
        # The search asks one memory at every step: a row of a translation has no second one.
        nearest = next((memory.nearest for memory in memories.values()), None)
        return Translator(self.network, row, nearest, self.corpus, self.search)

    @cached_property
    def network(self) -> Network:
        """The model that translates."""
        return self.encoded.settings.open(self.encoded.model.path())[0].to(self.search.hardware.device)

    def scores(self) -> list[dict[str, Any]]:
        """Return BLEU of every row."""
        return self.summary()["rows"]

    def bleu_statistics(self, number: int) -> list[list[int]]:
        """Return the statistics of BLEU for each translation of a row, as ``bleu_statistics`` does."""
        texts = read_json_lines(self.path() / f"row-{number}.jsonl")
        return bleu_statistics(texts, self.corpus.references(self.encoded.split)[: len(texts)])

    def examples(self, count: int) -> list[list[str]]:
        """Return sentences that are spread over the split, each with its source, its reference and every row's translation."""
        corpus, split = self.corpus, self.encoded.split
        rows = [read_json_lines(self.path() / f"row-{number}.jsonl") for number in range(len(self.scores()))]
        references = corpus.references(split)[: len(rows[0])]
        return [
            [corpus.source_text(split, number), references[number], *(row[number] for row in rows)]
            for number in evenly_spaced(len(references), count)
        ]


@dataclass(frozen=True, eq=False, repr=False)
class EvaluateTranslations(TestResults):
    """Loss and BLEU of every row on the test split: ``rows.json``."""

    kind, stage = "evaluate_translations", "evaluate"

    losses: Evaluate
    translations: Translate
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        results = [row | bleu for row, bleu in zip(self.losses.rows(), self.translations.scores(), strict=True)]
        for row in results:
            row["tuned"] |= {"k": row["k"]} if row["k"] else {}
        write_json(folder / "rows.json", results)

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row, with the statistics that a paired bootstrap of BLEU needs."""
        return [row | {"bleu_statistics": self.translations.bleu_statistics(n)} for n, row in enumerate(super().rows())]


@dataclass(frozen=True, eq=False, repr=False)
class TuneByBleu(TunedRows):
    """Tunes K: every row with memory gets the K whose translations of valid have the highest BLEU (``tuned.json``).

    ``without_memory`` holds the translations of the rows without memory, which come first; ``with_memory`` those of the
    other rows at each K, each with its own best temperatures or its own fitted mixture.
    """

    kind, stage, format = "tune_bleu", "tune", 4

    tunes: dict[int, TunedRows]
    without_memory: Translate
    with_memory: dict[int, Translate]
    lab: Free[Lab]

    @property
    def encoded(self) -> Encode:  # type: ignore[override]
        return next(iter(self.tunes.values())).encoded

    @property
    def memories(self) -> Memories:  # type: ignore[override]
        return next(iter(self.tunes.values())).memories

    def build(self, folder: Path) -> None:
        rows, first = self.without_memory.scores(), next(iter(self.tunes.values()))
        content = first.tuned() | {"k": [None for _ in rows]}
        content["rows"] = [row | scored for row, scored in zip(content["rows"], rows, strict=False)]
        for number in range(len(next(iter(self.with_memory.values())).scores())):
            # Rows with memory, which follow those without in every pass.
            by_k = {k: translations.scores()[number] for k, translations in self.with_memory.items()}
            best = max(by_k, key=lambda k: by_k[k]["bleu"])
            row = self.tunes[best].tuned()["rows"][len(rows) + number] | by_k[best]
            row["tuned"]["k"] = best
            content["rows"].append(row | {"bleu_by_k": {str(k): result["bleu"] for k, result in by_k.items()}})
            content |= {"recall": self.tunes[best].tuned()["recall"]}
            content["k"].append(best)
            # With two values or one, every choice is at the edge.
            if len(by_k) > 2 and best in (min(by_k), max(by_k)):
                log.warning(f"tune: {row['memories']}: K={best} is at the edge of the grid: widen translation.k")
        write_json(folder / "tuned.json", content)

    def for_row(self, row: int) -> TunedRows:
        """Return the pass at the row's best K."""
        k = self.tuned()["k"][row]
        return next(iter(self.tunes.values())) if k is None else self.tunes[k]

    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        return [self.for_row(number).rows()[number] for number in range(len(self.tuned()["rows"]))]


def bleu_statistics(texts: list[str], references: list[str]) -> list[list[int]]:
    """Return for each text its matching n-grams, all its n-grams (n = 1 to 4), its length and the reference's length."""
    from sacrebleu.metrics.bleu import BLEU

    # Statistics of one sentence, whose sums a bootstrap turns into corpus BLEU.
    metric = BLEU(effective_order=True)
    scores = [metric.sentence_score(text, [reference]) for text, reference in zip(texts, references, strict=True)]
    return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]


def score_translations(texts: list[str], references: list[str]) -> dict[str, Any]:
    """Return corpus BLEU with its signature (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    result = metric.corpus_score(texts, [references])
    return {"bleu": round(result.score, 2), "signature": str(metric.get_signature()), "sentences": len(texts)}
