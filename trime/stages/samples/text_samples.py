"""samples: passages of the test text, token by token, with the share of each memory and the entries used.

Drawing them takes long beside the rest of a report. Each is kept as it is drawn, so that the same command, killed or out of
time, goes on with the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.identity import Free
from trime.common.io import plain, write_atomically, write_json
from trime.common.progress import Progress
from trime.data.corpus import evenly_spaced
from trime.lab.artefact import Artefact, Lab
from trime.stages.generate import extend_shown
from trime.stages.graph import Graph
from trime.stages.samples.writers import GeneratedToken, Writer, last_row_memories

BLANKS = {"\n": "↵\n", " ": "␣", "": "·"}  # what is shown for a token of white space, or of a part of a character


@dataclass(frozen=True, eq=False, repr=False)
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
        text, before = self.graph.evaluated_corpus.corpus().split("test"), self.before
        if before is None:
            row, evaluate = self.graph.tune.rows()[-1], self.graph.config.evaluate
            model_memory = plain(self.graph.config.model.get("memory_size")) or 0
            # Enough to fill every memory, so that a passage shows them as they are deep inside a text.
            before = max(*row.sizes, model_memory) + evaluate.block + evaluate.context
        draws = [
            partial(self.passage, document, text.tokens[begin:middle].tolist(), text.tokens[middle:end].tolist())
            for document, begin, middle, end in passages(text.offsets, self.passages, self.tokens, before)
        ]
        samples = draw_all(draws, folder, self.minutes, time.monotonic)
        write_json(folder / "samples.json", samples, ensure_ascii=False)

    def passage(self, document: int, before: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return a passage whose tokens are annotated with their attribution, given the tokens before it."""
        writer = Writer(self.graph)
        writer.continuation.read(before)
        described = [*writer.explain(tokens, self.entries)]
        texts = (writer.text(before + tokens[:count]) for count in range(1, len(tokens) + 1))
        annotated = annotate(described, texts, writer.text(before))
        name = self.graph.evaluated_corpus.corpus().names("test")[document]
        return {"document": name, "row": writer.label, "before": writer.text(before), "tokens": annotated}


def samples_of(graph: Graph) -> Artefact | None:
    """Return a run's samples; None if its last row has no memories or one that holds the test text itself."""
    shown = plain(graph.config.report.samples)
    if not shown["passages"] or not last_row_memories(graph):
        return None
    test = graph.evaluated_corpus.corpus().fingerprint("test")
    if any(memory.fingerprint() == test for memory in graph.memories.stored.values()):
        return None
    if (own := graph.own_samples()) or graph.model_settings.reads_any_length:
        return own
    return Samples(graph.evaluate, **shown, graph=graph, lab=graph.lab)


def passages(offsets: np.ndarray, count: int, tokens: int, before: int) -> list[tuple[int, int, int, int]]:
    """Return (document, begin of reading, begin of the passage, end) of passages spread evenly over long enough documents.

    If no document is long enough, the longest one is used as far as it goes. There are ``count`` passages of ``tokens`` tokens,
    with ``before`` tokens read before each.
    """
    lengths = np.diff(offsets)
    long = np.flatnonzero(lengths >= before + tokens)
    long = long if len(long) else np.array([lengths.argmax()])
    # A place among the tokens of all long documents, so that longer ones get more passages.
    edges, result = np.cumsum([0, *lengths[long]]), []
    for place in evenly_spaced(int(edges[-1]), count):
        which = int(np.searchsorted(edges, place, side="right")) - 1
        first, last = int(offsets[long[which]]), int(offsets[long[which] + 1])
        end = min(last, first + max(place - int(edges[which]), before) + tokens)
        middle = max(first, end - tokens)
        result.append((int(long[which]), max(first, middle - before), middle, end))
    return list(dict.fromkeys(result))


class OutOfTimeError(Exception):
    """The next sample would not be drawn in time; ``samples`` are there already, ``total`` are wanted."""

    def __init__(self, samples: list[dict[str, Any]], total: int, minutes: float):
        super().__init__(
            f"{len(samples)} of {total} passages are on the page, the next would end after report.samples.minutes={minutes:g}: "
            "the same command draws more, report.samples.minutes=null all"
        )
        self.samples = samples


def draw_all(
    draws: Sequence[Callable[[], dict[str, Any]]], folder: Path, minutes: float | None, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Return all samples, drawing those that ``folder`` does not hold; ``clock`` returns seconds.

    At least one is drawn. OutOfTimeError if the next one, taking as long as those before, would end after ``minutes``.
    """
    samples: list[dict[str, Any]] = []
    started, drawn = clock(), 0
    with Progress(total=len(draws), desc="passages for the page") as bar:
        for number, draw in enumerate(draws):
            file = folder / f"part-{number:03d}.json"
            if not file.exists():
                # The first one is drawn at any cost: a page without samples says nothing about the memories.
                if minutes is not None and drawn and (clock() - started) * (drawn + 1) / drawn > 60 * minutes:
                    raise OutOfTimeError(samples, len(draws), minutes)
                write_atomically(file, json.dumps(draw(), ensure_ascii=False))
                drawn += 1
            samples.append(json.loads(file.read_text(encoding="utf-8")))
            bar.update()
    return samples


def annotate(tokens: Iterable[GeneratedToken], texts: Iterable[str], before: str) -> list[dict[str, Any]]:
    """Return each token of a passage as reports show it.

    ``texts`` are the whole text after each token, with what comes before the passage, ``before``.
    """
    annotated: list[dict[str, Any]] = []
    shown = before
    for token, text in zip(tokens, texts, strict=True):
        new, shown = extend_shown(shown, text)
        if annotated and annotated[-1]["shown"] in BLANKS.values():  # the white space was shown by its mark already
            new = new.lstrip()
        mark = next((mark for blank, mark in BLANKS.items() if blank in token.text), "·")
        annotated.append(token._asdict() | {"shown": new or mark})
    return annotated
