"""Writers that continue a prompt: an experiment's last row, or a pretrained model with memories in its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf

from trime.common.pretrained import is_encoder_decoder
from trime.data.datasets.base import lines_of
from trime.data.tokenizers import EOS, Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.decoding.generation import (
    AttributedToken,
    Continuation,
    TextScorer,
    TokenSampler,
    WindowLengths,
    agreeing_entries,
    top_attention,
    top_entries,
)
from trime.errors import UserError
from trime.scoring.rows import rows_of
from trime.stages.graph import Graph
from trime.stages.memories import StoredMemory
from trime.stages.pretrained import is_pretrained

CONTEXT = 8  # tokens shown before the token of an entry


class GeneratedToken(NamedTuple):
    """A token with its probability, the parts of that by source, and the entries that contributed most.

    ``agreeing`` is the number of each memory's entries that hold the token, and of all its entries.
    """

    text: str
    probability: float
    parts: dict[str, float]
    entries: list[dict[str, Any]]
    agreeing: dict[str, tuple[int, int]] | None = None


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
        if is_encoder_decoder(source) or not (was_fitted or last_row_memories(graph)):
            raise UserError(
                "generate and serve need an experiment whose rows have memories, such as decoder_memory: a model that has them "
                "in its layers writes in transformers, by model.generate(past_key_values=trime.EvictingCache(…))"
            )
    return Writer(graph)


def describe_step(
    step: AttributedToken, count: int, text: Callable[[list[int]], str], locate: Callable[[str, int], tuple[str, str]]
) -> GeneratedToken:
    """Return the token of a step with the parts of its probability and at most ``count`` entries of each kind.

    ``text`` returns tokens as text, ``locate`` text and place of a memory's entry, given its number.
    """
    parts = {name: float(part[step.token]) for name, part in step.attribution.parts.items()}
    top = [*top_entries(step, count), *top_attention(step, count)] if count else []
    entries = [shown_entry(memory, share, *locate(memory, number)) for memory, share, number in top]
    probability = float(step.attribution.probability[step.token])
    return GeneratedToken(text([step.token]), probability, parts, entries, agreeing_entries(step) if count else None)


def shown_entry(memory: str, share: float, text: str, place: str) -> dict[str, Any]:
    """Return an entry as reports show it."""
    return {"memory": memory, "share": share, "text": " ".join(text.split()), "place": place}


def locate_in_text(writer: Writer, tokens: list[int], position: int) -> tuple[str, str]:
    """Return text and place of an entry that comes from the text being written."""
    return writer.text(tokens[max(0, position - CONTEXT) : position + 1]), f"token {position:,} of this text"


def last_row_memories(graph: Graph) -> set[str]:
    """Return the names of the memories of the experiment's last row."""
    return rows_of(graph.config)[-1].memories


class Writer:
    """A writer with an experiment's model, and its last row's memories and tuned settings."""

    def __init__(self, graph: Graph):
        self.graph, config = graph, graph.config
        self.folder = graph.run_folder
        self.vocabulary: Vocabulary = graph.corpus.corpus().vocabulary
        self.tokenizer: Tokenizer = graph.corpus.dataset.tokenizer
        # A row without memories has nothing to tune.
        self.row = graph.tune.rows()[-1] if last_row_memories(graph) else rows_of(config)[-1]
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
        # A stateful model carries what it has read, so that its windows need no context.
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
        """Return the tokens of a whole text with their probability and its parts by memory; nothing that was read counts."""
        scored: list[GeneratedToken] = []
        for log_probability, parts in self.scorer.score(ids):
            columns = {name: part.tolist() for name, part in parts.items()}
            for number, value in enumerate(log_probability.double().exp().tolist()):
                shares = {name: column[number] for name, column in columns.items()}
                scored.append(GeneratedToken(self.text([ids[len(scored)]]), value, shares, []))
        self.continuation.restart()
        return scored

    @torch.no_grad()
    def explain(self, ids: list[int], entries: int) -> Iterator[GeneratedToken]:
        """Yield the tokens of a text that goes on here, each with at most ``entries`` entries of each kind, and read them."""
        for token in ids:
            attribution, seen = self.continuation.next()
            step = AttributedToken(token, attribution, seen, self.continuation.network.attention_trace())
            yield self.describe_step(step, entries)
            self.continuation.read([token])

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end of line that only the tokenizer adds."""
        symbols = [symbol for part in self.tokenizer.tokens(lines_of(text.encode())) for symbol in part]
        # Lines end with EOS, but a prompt need not end with its line.
        if symbols[-1:] == [EOS] and not text.endswith("\n"):
            symbols.pop()
        return [self.vocabulary.index[symbol] for symbol in symbols]

    def write(self, explain: bool = False, seed: int | None = None) -> Iterator[GeneratedToken]:
        """Yield ``generate.max_new_tokens`` generated tokens, none of which is ``<unk>``; ``explain``: with entries."""
        config, settings = self.graph.config, self.settings
        unknown = self.vocabulary.unknown
        excluded = (unknown,) if unknown != self.vocabulary.eos else ()  # some pretrained models have no token for it
        sampler = TokenSampler(settings.temperature, settings.top_p, excluded)
        for step in self.continuation.generate(settings.max_new_tokens, sampler, config.seed if seed is None else seed):
            described = self.describe_step(step, settings.entries if explain or config.explain else 0)
            self.written.append(step.token)
            yield described

    def describe_step(self, step: AttributedToken, count: int) -> GeneratedToken:
        """Return the token of a step with the parts of its probability and at most ``count`` entries of each kind."""

        def locate(memory: str, number: int) -> tuple[str, str]:
            source = self.sources.get(memory)
            return source.locate(number) if source else locate_in_text(self, self.continuation.tokens, number)

        return describe_step(step, count, self.text, locate)

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text."""
        return self.tokenizer.text([self.vocabulary.symbols[token] for token in tokens])
