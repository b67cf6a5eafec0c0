"""Translations of the report's page, piece by piece, with the share of the memory and the entries used."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import write_json
from trime.data.corpus import evenly_spaced
from trime.decoding.explanation import annotate, describe_step
from trime.lab.artefact import Artefact, Lab
from trime.stages.memories import StoredMemory
from trime.stages.samples import StoredText, draw_all
from trime.translation.beam import Translator
from trime.translation.pairs.corpus import ParallelCorpus
from trime.translation.translate import Translate


class StoredPairs(StoredText):
    """The target sentences that a memory is read from, each shown with its source."""

    def __init__(self, memory: StoredMemory, pairs: ParallelCorpus):
        super().__init__(memory, pairs.tokenizer)
        self.pairs = pairs

    def locate(self, number: int) -> tuple[str, str]:
        (words, where), place, split = super().locate(number), self.memory.place(number), self.memory.split
        return words, f"{split}, {where}: {self.pairs.source_text(split, place[0])}" if place else where


@dataclass(frozen=True, eq=False, repr=False)
class TranslationSamples(Artefact):
    """``samples.json``: translations of the report page, with the last row's memory and tuned settings."""

    kind, stage, format = "samples", "report", 3
    summary_file = "samples.json"

    translations: Translate
    passages: int
    entries: int  # of memories, shown per piece
    minutes: Free[float | None]  # no further translation is drawn that would end later
    memory: Free[StoredMemory]  # of the last row
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        rows = self.translations.tune.rows()
        translator = self.translations.translator(len(rows) - 1)
        stored = StoredPairs(self.memory, translator.corpus)
        numbers = evenly_spaced(self.translations.scores()[-1]["sentences"], self.passages)
        draws = [partial(self.translation, translator, stored, number, rows[-1].label) for number in numbers]
        samples = draw_all(draws, folder, self.minutes, time.monotonic)
        write_json(folder / "samples.json", samples, ensure_ascii=False)

    def translation(self, translator: Translator, stored: StoredPairs, number: int, row: str) -> dict[str, Any]:
        """Return a sentence's translation, whose pieces are annotated with their attribution."""
        corpus = translator.corpus
        steps = translator.steps(corpus.sources.split("test").document(number).tolist(), number)
        described = [
            describe_step(step, self.entries, translator.text, lambda _, entry: stored.locate(entry)) for step in steps
        ]
        written = [step.token for step in steps]
        texts = [translator.text(written[:end]) for end in range(1, len(written) + 1)]
        name, before = corpus.names("test")[number], f"{corpus.source_text('test', number)} → "
        return {"document": name, "row": row, "before": before, "tokens": annotate(described, texts, "")}
