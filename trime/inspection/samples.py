"""samples: passages of test, token by token, with what each memory gave and the entries that gave most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trime.evaluation.generation import Step
from trime.inspection.generate import added
from trime.inspection.writers import Writer, own_memories
from trime.io import plain
from trime.pipeline.artefact import Artefact
from trime.pipeline.pretrained import is_pretrained
from trime.plan.language_model import Plan

BLANKS = {"\n": "↵\n", " ": "␣", "": "·"}


class Samples(Artefact):
    """``samples.json``: passages as a reader sees them. Read like prompts: evaluation's windows, the memories as tuned."""

    kind, stage = "samples", "report"

    def __init__(self, plan: Plan):
        super().__init__(plan.config)
        self.plan = plan

    def needs(self) -> list[Artefact]:
        return [self.plan.evaluate]

    def settings(self) -> Any:
        return plain(self.config.report.samples)

    def build(self, folder: Path) -> None:
        wanted = plain(self.config.report.samples) | {"before": self.before()}
        text = self.plan.evaluated_corpus.corpus().split("test")
        found = [
            self.passage(document, text.tokens[begin:middle].tolist(), text.tokens[middle:end].tolist())
            for document, begin, middle, end in passages(text.offsets, wanted)
        ]
        (folder / "samples.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))

    def before(self) -> int:
        """Tokens that are read before a passage: where nothing is said, so many that the memories are full."""
        row, evaluate = self.plan.tune.rows()[-1], self.config.evaluate
        inside = plain(self.config.model.get("memory_size")) or 0
        return self.config.report.samples.before or max(*row.sizes, inside) + evaluate.block + evaluate.context

    def passage(self, document: int, before: list[int], tokens: list[int]) -> dict[str, Any]:
        """What the row says of each token, given those before it."""
        writer = Writer(self.plan)
        told: list[dict[str, Any]] = []
        continuation = writer.continuation
        continuation.read(before)
        shown = before_text = writer.text(before)
        for place, token in enumerate(tokens, 1):
            found, entries = continuation.next()
            step = Step(token, found, entries, continuation.network.attention_trace())
            fresh, shown = added(shown, writer.text(before + tokens[:place]))
            if told and told[-1]["shown"] in BLANKS.values():  # what it stands for is not shown again
                fresh = fresh.lstrip()
            one = writer.told(step, self.config.report.samples.entries)
            told.append(one._asdict() | {"shown": fresh or blank(one.text)})
            continuation.read([token])
        name = self.plan.evaluated_corpus.corpus().names("test")[document]
        return {"document": name, "row": writer.label, "before": before_text, "tokens": told}

    def found(self) -> list[dict[str, Any]]:
        return self.read("samples.json")


def blank(text: str) -> str:
    """A mark for a token of which nothing is seen: white space, or a part of a character."""
    return next((mark for found, mark in BLANKS.items() if found in text), "·")


def samples_of(plan: Plan) -> list[dict[str, Any]]:
    """The samples of a run whose own row has memories, made where missing; none where a memory could tell the answer."""
    config = plan.config
    if config.task == "translation" or not config.report.samples.passages or not own_memories(plan) or holds_test(plan):
        return []
    if is_pretrained(config) and plain(config.model.memory_size):
        return []
    samples = Samples(plan)
    samples.make()
    return samples.found()


def holds_test(plan: Plan) -> bool:
    """The datastore holds the very text that samples are of."""
    return bool(plan.index) and plan.index.information()["text"] == plan.evaluated_corpus.corpus().fingerprint("test")  # type: ignore[union-attr]


def passages(offsets: np.ndarray, wanted: dict[str, int]) -> list[tuple[int, int, int, int]]:
    """Document, where reading begins, where the passage does, where it ends: spread evenly over documents that are long enough.

    Where none is, the longest one is read as far as it goes.
    """
    lengths = np.diff(offsets)
    long = np.flatnonzero(lengths >= wanted["before"] + wanted["tokens"])
    long = long if len(long) else np.array([lengths.argmax()])
    edges, found = np.cumsum([0, *lengths[long]]), []
    for number in range(wanted["passages"]):
        place = int(edges[-1]) * (2 * number + 1) // (2 * wanted["passages"])
        which = int(np.searchsorted(edges, place, side="right")) - 1
        first, last = int(offsets[long[which]]), int(offsets[long[which] + 1])
        end = min(last, first + max(place - int(edges[which]), wanted["before"]) + wanted["tokens"])
        middle = max(first, end - wanted["tokens"])
        found.append((int(long[which]), max(first, middle - wanted["before"]), middle, end))
    return list(dict.fromkeys(found))
