"""samples: passages of the test text, token by token, with the share of each memory and the entries that contributed most."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.identity import Free
from trime.common.io import plain, write_json
from trime.data.corpus import evenly_spaced
from trime.decoding.generation import AttributedToken
from trime.lab.artefact import Artefact, Lab
from trime.stages.graph import Graph
from trime.stages.samples.annotated import annotate
from trime.stages.samples.drawing import draw_all
from trime.stages.samples.translation_samples import TranslationSamples
from trime.stages.samples.writers import Writer, last_row_memories
from trime.stages.translation.graph import TranslationGraph


@dataclass(frozen=True, eq=False)
class Samples(Artefact):
    """``samples.json``: passages of the report page, read like prompts, with evaluation's windows and tuned memories."""

    kind, stage, format = "samples", "report", 3
    summary_file = "samples.json"

    evaluate: Artefact
    passages: int
    before: int | None  # tokens read before a passage; None: as many as fill the memories
    tokens: int  # of a passage
    entries: int  # of memories, shown per token
    minutes: Free[float | None]  # no further passage is drawn that would end later
    graph: Free[Graph]
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        text = self.graph.evaluated_corpus.corpus().split("test")
        draws = [
            partial(self.passage, document, text.tokens[begin:middle].tolist(), text.tokens[middle:end].tolist())
            for document, begin, middle, end in passages(text.offsets, self.passages, self.tokens, self.tokens_before())
        ]
        samples = draw_all(draws, folder, self.minutes, time.monotonic)
        write_json(folder / "samples.json", samples, ensure_ascii=False)

    def tokens_before(self) -> int:
        """Return the number of tokens read before a passage; by default enough to fill the memories."""
        if self.before is not None:
            return self.before
        row, evaluate = self.graph.tune.rows()[-1], self.graph.config.evaluate
        model_memory = plain(self.graph.config.model.get("memory_size")) or 0
        return max(*row.sizes, model_memory) + evaluate.block + evaluate.context

    def passage(self, document: int, before: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return a passage whose tokens are annotated with their attribution, given the tokens before it."""
        writer = Writer(self.graph)
        writer.continuation.read(before)
        described = []
        for token in tokens:
            attribution, entries = writer.continuation.next()
            step = AttributedToken(token, attribution, entries, writer.continuation.network.attention_trace())
            described.append(writer.describe_step(step, self.entries))
            writer.continuation.read([token])
        texts = (writer.text(before + tokens[:count]) for count in range(1, len(tokens) + 1))
        annotated = annotate(described, texts, writer.text(before))
        name = self.graph.evaluated_corpus.corpus().names("test")[document]
        return {"document": name, "row": writer.label, "before": writer.text(before), "tokens": annotated}


def samples_of(graph: Graph) -> Samples | TranslationSamples | None:
    """Return a run's samples; None if its last row has no memories or one that holds the test text."""
    config = graph.config
    if not config.report.samples.passages or not last_row_memories(graph) or holds_test(graph):
        return None
    shown = plain(config.report.samples)
    if isinstance(graph, TranslationGraph):
        del shown["before"], shown["tokens"]
        return TranslationSamples(graph.evaluate.translations, **shown, graph=graph, lab=graph.lab)
    if graph.model_settings.reads_any_length:
        return None
    return Samples(graph.evaluate, **shown, graph=graph, lab=graph.lab)


def holds_test(graph: Graph) -> bool:
    """Return True if a memory holds the test text itself."""
    test = graph.evaluated_corpus.corpus().fingerprint("test")
    return any(memory.fingerprint() == test for memory in graph.memories.stored.values())


def passages(offsets: np.ndarray, count: int, tokens: int, before: int) -> list[tuple[int, int, int, int]]:
    """Return (document, begin of reading, begin of the passage, end) of passages spread evenly over long enough documents.

    If no document is long enough, the longest one is used as far as it goes. There are ``count`` passages of ``tokens`` tokens,
    with ``before`` tokens read before each.
    """
    lengths = np.diff(offsets)
    long = np.flatnonzero(lengths >= before + tokens)
    long = long if len(long) else np.array([lengths.argmax()])
    edges, result = np.cumsum([0, *lengths[long]]), []
    for place in evenly_spaced(int(edges[-1]), count):
        which = int(np.searchsorted(edges, place, side="right")) - 1
        first, last = int(offsets[long[which]]), int(offsets[long[which] + 1])
        end = min(last, first + max(place - int(edges[which]), before) + tokens)
        middle = max(first, end - tokens)
        result.append((int(long[which]), max(first, middle - before), middle, end))
    return list(dict.fromkeys(result))
