"""samples: passages of the test text, token by token, with the share of each memory and the entries used; the writer.

Drawing them takes long beside the rest of a report. Each is kept as it is drawn, so that the same command, killed or out of
time, goes on with the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from trime.common.identity import Free
from trime.common.io import plain, write_atomically, write_json
from trime.common.pretrained import is_encoder_decoder
from trime.common.progress import Progress
from trime.data.corpus import evenly_spaced
from trime.data.datasets.base import lines_of
from trime.data.tokenizers import EOS, Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.decoding.explanation import GeneratedToken, annotate, describe_step
from trime.decoding.generation import (
    AttributedToken,
    Continuation,
    TextScorer,
    TokenSampler,
    WindowLengths,
)
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.stages.graph import Graph
from trime.stages.memories import StoredMemory
from trime.stages.pretrained import is_pretrained

CONTEXT = 8  # tokens shown before the token of an entry


class StoredText:
    """The text that a memory is read from; ``tokenizer``: by default that of its dataset."""

    def __init__(self, memory: StoredMemory, tokenizer: Tokenizer | None = None):
        self.memory, self.corpus = memory, memory.text.corpus()
        self.tokenizer = tokenizer or memory.text.dataset.tokenizer

    def locate(self, number: int) -> tuple[str, str]:
        """Return the text of an entry up to its target, and its place; only the number if the text is not available."""
        place, split = self.memory.place(number), self.memory.split
        if place is None:  # a datastore of another run
            return "", f"entry {number:,}"
        document, position = place
        tokens = self.corpus.split(split).document(document)[max(0, position - CONTEXT) : position + 1].tolist()
        words = self.tokenizer.text([self.corpus.vocabulary.symbols[token] for token in tokens])
        name, lines = self.corpus.names(split)[document], self.lines(split, document)
        return words, f"{name}, line {lines[position]:,}" if lines is not None else f"{name}, token {position:,}"

    @cache  # noqa: B019 (it lives as long as the process writes)
    def lines(self, split: str, document: int) -> np.ndarray | None:
        """Return the line of its file for each token of a document; None where it has none, or is not as it was prepared."""
        name, count = self.corpus.names(split)[document], len(self.corpus.split(split).document(document))
        dataset = self.memory.text.dataset
        try:
            found = next((each for each in dataset.documents(split) if each.name == name), None)
            lines = np.fromiter(found.line_numbers(self.tokenizer) if found else (), np.int64)
        except (OSError, UserError):  # the files are not there any more
            return None
        return lines if len(lines) == count else None


def open_writer(graph: Graph) -> Writer:
    """Return a writer with the experiment's last row; UserError for a model that only has memories in its layers."""
    if is_pretrained(graph.config):
        source = str(graph.small_model.path()) if graph.small_model else graph.config.model.name
        was_fitted = graph.config.checkpoint or (not graph.small_model and graph.fit.folder.is_dir())
        if is_encoder_decoder(source) or not (was_fitted or graph.table[-1].memories):
            raise UserError(
                "generate and serve need an experiment whose rows have memories, such as decoder_memory: a model that has them "
                "in its layers writes in transformers, by model.generate(past_key_values=trime.EvictingCache(…))"
            )
    return Writer(graph)


class Writer:
    """A writer with an experiment's model, and its last row's memories and tuned settings."""

    def __init__(self, graph: Graph):
        self.graph, config = graph, graph.config
        self.folder = graph.run_folder
        self.vocabulary: Vocabulary = graph.corpus.corpus().vocabulary
        self.tokenizer: Tokenizer = graph.corpus.dataset.tokenizer
        # A row without memories has nothing to tune.
        self.row = graph.tune.rows()[-1] if graph.table[-1].memories else graph.table[-1]
        self.label = self.row.label
        network, described = graph.model_settings.open(graph.model.path())
        if described["vocabulary_fingerprint"] != self.vocabulary.fingerprint:
            raise UserError(
                "the model was trained with another vocabulary than the dataset's: name the dataset it was trained on"
            )
        device = graph.hardware.device
        prompt = {"text": None, "bounded": True, "split": "prompt"}
        memories = graph.memories.open_all(prompt, list(self.row.sizes), self.row.memories)
        evaluate = config.evaluate
        # A stateful model carries the text that it has read, so that its windows need no context.
        windows = WindowLengths(evaluate.block, 0 if network.is_stateful else evaluate.context)
        eos, scaled = self.vocabulary.eos, evaluate.scaled_interpolation
        self.sources = {name: StoredText(graph.memories.stored[name]) for name in memories if name in graph.memories.stored}
        size = len(self.vocabulary)
        self.continuation = Continuation(network.to(device), self.row, memories, windows, eos, size, scaled)
        self.scorer = TextScorer(network, self.row, memories, windows, eos, scaled)
        self.settings = config.generate
        self.written: list[int] = []

    @property
    def memories(self) -> list[str]:
        """Return the names of the row's memories, in order."""
        return [name for name in self.graph.config.test_memories if name in self.row.memories]

    def restart(self, settings: Mapping[str, Any]) -> None:
        """Forget the text that was read and written; the next one is written with these settings of ``generate``."""
        self.continuation.restart()
        self.settings, self.written = OmegaConf.merge(self.graph.config.generate, settings), []

    def read(self, prompt: str) -> list[int]:
        """Read a prompt; return its tokens."""
        ids = self.token_ids(prompt)
        self.continuation.read(ids)
        return ids

    def score(self, ids: list[int]) -> list[GeneratedToken]:
        """Return the tokens of a whole text with probabilities and the contributions to them; nothing that was read counts."""
        scored: list[GeneratedToken] = []
        for log_probability, contributions in self.scorer.score(ids):
            columns = {name: column.tolist() for name, column in contributions.items()}
            for number, value in enumerate(log_probability.double().exp().tolist()):
                shares = {name: column[number] for name, column in columns.items()}
                scored.append(GeneratedToken(self.text([ids[len(scored)]]), value, shares, []))
        self.continuation.restart()
        return scored

    @torch.no_grad()
    def explain(self, ids: list[int], entries: int) -> Iterator[GeneratedToken]:
        """Yield the tokens of a text that goes on here, each with at most ``entries`` entries of each kind, and read them."""
        for step in self.steps_of(ids):
            yield self.describe_step(step, entries)

    def steps_of(self, ids: list[int]) -> Iterator[AttributedToken]:
        """Yield the tokens of a text that goes on here, each with what was predicted before it, and read them."""
        for token in ids:
            attribution, seen = self.continuation.next()
            yield AttributedToken(token, attribution, seen, self.continuation.network.attention_trace())
            self.continuation.read([token])

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end of line that only the tokenizer adds."""
        symbols = [symbol for line in self.tokenizer.tokens(lines_of(text.encode())) for symbol in line]
        # Lines end with EOS, but a prompt need not end with its line.
        if symbols[-1:] == [EOS] and not text.endswith("\n"):
            symbols.pop()
        return [self.vocabulary.index[symbol] for symbol in symbols]

    def write(self, explain: bool = False, seed: int | None = None) -> Iterator[GeneratedToken]:
        """Yield ``generate.max_new_tokens`` generated tokens, never ``<unk>``; ``explain``: with entries."""
        count = self.settings.entries if explain or self.graph.config.explain else 0
        for step in self.steps(seed):
            yield self.describe_step(step, count)

    def steps(self, seed: int | None = None) -> Iterator[AttributedToken]:
        """Yield the tokens that are written, each with what was predicted before it."""
        config, settings = self.graph.config, self.settings
        unknown = self.vocabulary.unknown
        excluded = (unknown,) if unknown != self.vocabulary.eos else ()  # some pretrained models have no token for it
        sampler = TokenSampler(settings.temperature, settings.top_p, excluded)
        for step in self.continuation.generate(settings.max_new_tokens, sampler, config.seed if seed is None else seed):
            self.written.append(step.token)
            yield step

    def describe_step(self, step: AttributedToken, count: int) -> GeneratedToken:
        """Return the token of a step with the contributions to its probability and at most ``count`` entries of each kind."""

        def locate(memory: str, number: int) -> tuple[str, str]:
            if source := self.sources.get(memory):
                return source.locate(number)
            written = self.continuation.tokens  # the entry is a position in the text that is being written
            return self.text(written[max(0, number - CONTEXT) : number + 1]), f"token {number:,} of this text"

        return describe_step(step, count, self.text, locate)

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text."""
        return self.tokenizer.text([self.vocabulary.symbols[token] for token in tokens])


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
    if not shown["passages"] or not graph.table[-1].memories:
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
