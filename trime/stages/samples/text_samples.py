"""samples: passages of the test text, token by token, with the share of each memory and the entries that contributed most."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.io import plain, write_json
from trime.data.corpus import evenly_spaced
from trime.decoding.generation import AttributedToken
from trime.lab.artefact import Artefact, ConfiguredArtefact
from trime.stages.graph import Graph
from trime.stages.pretrained import is_pretrained
from trime.stages.samples.annotated import annotate
from trime.stages.samples.drawing import draw_all
from trime.stages.samples.translation_samples import TranslationSamples
from trime.stages.samples.writers import Writer, last_row_memories
from trime.stages.translation.graph import TranslationGraph


class Samples(ConfiguredArtefact):
    """``samples.json``: passages of the report page, read like prompts, with evaluation's windows and tuned memories."""

    kind, stage, depends_on = "samples", "report", ("report.samples",)
    format = 2  # 2: entries of the largest memory first, and how many agree
    summary_file = "samples.json"
    unhashed = ("evaluate.block", "evaluate.context", "model", "report.samples.minutes")

    def __init__(self, graph: Graph):
        super().__init__(graph.config)
        self.graph = graph

    def needs(self) -> list[Artefact]:
        return [self.graph.evaluate]

    def build(self, folder: Path) -> None:
        settings = plain(self.config.report.samples) | {"before": self.before()}
        text = self.graph.evaluated_corpus.corpus().split("test")
        draws = [
            partial(self.passage, document, text.tokens[begin:middle].tolist(), text.tokens[middle:end].tolist())
            for document, begin, middle, end in passages(text.offsets, settings)
        ]
        samples = draw_all(draws, folder, settings["minutes"], time.monotonic)
        write_json(folder / "samples.json", samples, ensure_ascii=False)

    def before(self) -> int:
        """Return the number of tokens read before a passage; by default enough to fill the memories."""
        if (before := self.config.report.samples.before) is not None:
            return int(before)
        row, evaluate = self.graph.tune.rows()[-1], self.config.evaluate
        model_memory = plain(self.config.model.get("memory_size")) or 0
        return max(*row.sizes, model_memory) + evaluate.block + evaluate.context

    def passage(self, document: int, before: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return a passage whose tokens are annotated with their attribution, given the tokens before it."""
        writer = Writer(self.graph)
        writer.continuation.read(before)
        described = []
        for token in tokens:
            attribution, entries = writer.continuation.next()
            step = AttributedToken(token, attribution, entries, writer.continuation.network.attention_trace())
            described.append(writer.describe_step(step, self.config.report.samples.entries))
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
    if isinstance(graph, TranslationGraph):
        return TranslationSamples(graph)
    return None if is_pretrained(config) and plain(config.model.memory_size) else Samples(graph)


def holds_test(graph: Graph) -> bool:
    """Return True if a memory holds the test text itself."""
    test = graph.evaluated_corpus.corpus().fingerprint("test")
    return any(memory.fingerprint() == test for memory in graph.memories.stored.values())


def passages(offsets: np.ndarray, settings: dict[str, int]) -> list[tuple[int, int, int, int]]:
    """Return (document, begin of reading, begin of the passage, end) of passages spread evenly over long enough documents.

    If no document is long enough, the longest one is used as far as it goes. ``settings`` has ``passages``, and the numbers
    of ``tokens`` of a passage and of those read ``before`` it.
    """
    lengths = np.diff(offsets)
    long = np.flatnonzero(lengths >= settings["before"] + settings["tokens"])
    long = long if len(long) else np.array([lengths.argmax()])
    edges, result = np.cumsum([0, *lengths[long]]), []
    for place in evenly_spaced(int(edges[-1]), settings["passages"]):
        which = int(np.searchsorted(edges, place, side="right")) - 1
        first, last = int(offsets[long[which]]), int(offsets[long[which] + 1])
        end = min(last, first + max(place - int(edges[which]), settings["before"]) + settings["tokens"])
        middle = max(first, end - settings["tokens"])
        result.append((int(long[which]), max(first, middle - settings["before"]), middle, end))
    return list(dict.fromkeys(result))
