"""samples of a translation run: sentences of test, with the share of the memory in each piece and the entries used."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import write_json
from trime.data.corpus import evenly_spaced
from trime.data.parallel.corpus import ParallelCorpus
from trime.decoding.translator import Translator
from trime.lab.artefact import Artefact, Lab
from trime.stages.memories import StoredMemory
from trime.stages.samples.annotated import annotate
from trime.stages.samples.drawing import draw_all
from trime.stages.samples.stored_text import StoredText
from trime.stages.samples.writers import describe_step
from trime.stages.translation.graph import TranslationGraph
from trime.stages.translation.translate import Translate


@dataclass(frozen=True, eq=False)
class TranslationSamples(Artefact):
    """``samples.json``: translations of the report page, with the last row's memory and tuned settings."""

    kind, stage, format = "samples", "report", 3
    summary_file = "samples.json"

    translations: Translate
    passages: int
    entries: int  # of memories, shown per piece
    minutes: Free[float | None]  # no further translation is drawn that would end later
    graph: Free[TranslationGraph]
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        rows = self.translations.tune.rows()
        translator = self.translations.translator(len(rows) - 1)
        (memory,) = (self.graph.memories.stored[name] for name in rows[-1].memories)
        pairs = PairText(memory, self.graph.corpus.corpus())
        count, wanted = self.translations.scores()[-1]["sentences"], self.passages
        draws = [
            partial(self.translation, translator, pairs, number, rows[-1].label) for number in evenly_spaced(count, wanted)
        ]
        samples = draw_all(draws, folder, self.minutes, time.monotonic)
        write_json(folder / "samples.json", samples, ensure_ascii=False)

    def translation(self, translator: Translator, pairs: PairText, number: int, row: str) -> dict[str, Any]:
        """Return a sentence's translation, whose pieces are annotated with their attribution."""
        corpus = translator.corpus
        steps = translator.steps(corpus.sources.split("test").document(number).tolist(), number)
        described = [describe_step(step, self.entries, translator.text, lambda _, entry: pairs.locate(entry)) for step in steps]
        written = [step.token for step in steps]
        texts = [translator.text(written[:end]) for end in range(1, len(written) + 1)]
        name, before = corpus.names("test")[number], f"{corpus.source_text('test', number)} → "
        return {"document": name, "row": row, "before": before, "tokens": annotate(described, texts, "")}


class PairText(StoredText):
    """The target sentences of a datastore, with the sources that they translate."""

    def __init__(self, memory: StoredMemory, pairs: ParallelCorpus):
        super().__init__(memory)
        self.pairs, self.tokenizer = pairs, pairs.tokenizer

    def locate(self, number: int) -> tuple[str, str]:
        """Return the text of an entry up to its target, and its sentence with the source of that."""
        text, name = super().locate(number)
        if place := self.memory.place(number):
            split = self.memory.split
            return text, f"{split}, {name}: {self.pairs.source_text(split, place[0])}"
        return text, name
