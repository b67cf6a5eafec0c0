"""Answers to long prompts: read with memories, then decoded greedily (Attendre sections 3.3 and 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from trime.eviction.fifo import FIFO
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.attendre import Attendre
from trime.models.layers.attention import AttentionTrace, mean_trace
from trime.models.pretrained.reader import Hidden, LongReader
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.t5 import T5Encoder
from trime.types import Float, Int, Tensor


@runtime_checkable
class AnswerSession(Protocol):
    """Prompts that have been read, and their answers token by token."""

    rows: int
    device: Any
    kept: list[Int[Tensor, "b m"]]  # by layer, the positions of the prompts that its memory held at the end; -1: empty slot

    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Return the logits of each row's next token; ``so_far`` grows by one token at a time."""

    def attention_trace(self) -> AttentionTrace:
        """Return the attention of the last step."""


@runtime_checkable
class Reading(Protocol):
    """Texts that have been read as far as a question about them; several questions may follow, each as if it were the first."""

    def ask(self, questions: list[list[int]], texts: list[int] | None = None) -> AnswerSession:
        """Read on with a batch of questions about these texts (None: one for each); texts themselves are not read again."""


@runtime_checkable
class Answerer(Protocol):
    """A model that reads prompts with memories and then answers."""

    def start(
        self, texts: list[list[int]], record_attention: bool = False, questions: list[list[int]] | None = None
    ) -> Reading:
        """Read the beginnings of prompts as a batch, of any lengths; ``record_attention`` keeps the attention of every step.

        ``questions``: how each of them goes on, for a reading that knows what it will be asked (prefill guided).
        """

    def read(self, prompts: list[list[int]], record_attention: bool = False) -> AnswerSession:
        """Read whole prompts."""


class ReadingConfig:
    """How prompts are read: a memory for each layer, chunks of a size, and flush or drain at the end.

    ``prefill``: entries are evicted chunk by chunk (chunked), or a part of a prompt, such as the text before the question, is
    read with everything kept, and the memories are cut to their sizes after it (whole, as prompt compression does). guided:
    chunk by chunk, and after each chunk of the text the question, which is known by then, attends to all that is kept, so that
    it decides what is evicted next (Finch, Corallo and Papotti 2024).
    ``per_head``: each head of keys evicts for itself.
    """

    def __init__(
        self,
        memories: list[Attendre],
        chunk: int = 128,
        end: str = "flush",
        prefill: str = "chunked",
        per_head: bool = False,
    ):
        self.memories, self.chunk, self.ending, self.prefill, self.per_head = memories, chunk, end, prefill, per_head

    def reader(self, family: Any, record_attention: bool = False) -> LongReader:
        """Return a reader with these memories for a model."""
        return LongReader(family, self.memories, self.chunk, record_attention, self.per_head)

    def read(
        self, reader: LongReader, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"], is_last: bool
    ) -> Iterator[Hidden]:
        """Let a reader read a part of its prompts, the last one with the queries that still wait, and yield the outputs."""
        sizes = [memory.keys.size for memory in self.memories]
        if self.prefill == "whole":
            reader.resize([size + tokens.shape[1] for size in sizes])
        yield from reader.feed(tokens, position)
        if is_last:
            yield from reader.end(self.ending)
        if self.prefill == "whole":
            reader.resize(sizes)

    def read_text(self, reader: LongReader, texts: list[list[int]], questions: list[list[int]] | None, device: Any) -> None:
        """Let a reader read the beginnings of prompts, and ``questions`` attend after each chunk if they guide it."""
        tokens, position = pad_prompts(texts, device)
        if self.prefill != "guided":
            for _ in self.read(reader, tokens, position, is_last=False):
                pass
            return
        if questions is None:
            raise ValueError("prefill=guided needs the questions before the texts are read: pass start(texts, questions=…)")
        for number, _ in enumerate(self.read(reader, tokens, position, is_last=False)):
            so_far = [min(len(text), (number + 1) * self.chunk) for text in texts]
            asked, places = pad_prompts(questions, device, so_far)
            has_ended = torch.tensor([len(text) <= number * self.chunk for text in texts], device=device)
            reader.look_back(asked, places.masked_fill(has_ended[:, None], -1))


class DecoderAnswerer:
    """A decoder that reads the prompt and continues it; generated tokens do not wait."""

    def __init__(self, family: RopeDecoder, reading: ReadingConfig):
        self.family, self.reading = family, reading

    def start(
        self, texts: list[list[int]], record_attention: bool = False, questions: list[list[int]] | None = None
    ) -> DecoderReading:
        """Read the beginnings of prompts as a batch."""
        reader = self.reading.reader(self.family, record_attention)
        self.reading.read_text(reader, texts, questions, self.family.model.device)
        return DecoderReading(self, reader, [*map(len, texts)])

    def read(self, prompts: list[list[int]], record_attention: bool = False) -> DecoderSession:
        """Read whole prompts as a batch."""
        return self.start([[]] * len(prompts), record_attention).ask(prompts)


class DecoderReading:
    """A decoder that has read texts of some ``lengths``."""

    def __init__(self, answerer: DecoderAnswerer, reader: LongReader, lengths: list[int]):
        self.answerer, self.reader, self.lengths = answerer, reader, lengths

    def ask(self, questions: list[list[int]], texts: list[int] | None = None) -> DecoderSession:
        """Read on with a batch of questions about these texts; None: one for each."""
        texts = [*range(len(self.lengths))] if texts is None else texts
        return DecoderSession(self.answerer, self.reader.fork(texts), questions, [self.lengths[text] for text in texts])


class DecoderSession:
    """A decoder that has read its prompts, of which the last parts are ``questions``, after texts of some ``lengths``."""

    def __init__(self, answerer: DecoderAnswerer, reader: LongReader, questions: list[list[int]], lengths: list[int]):
        self.family, self.reader, self.rows = answerer.family, reader, len(questions)
        tokens, position = pad_prompts(questions, self.family.model.device, lengths)
        self.device, self.last_position = tokens.device, position.amax(1, keepdim=True)
        last = LastOutput(position.amax(1))
        for hidden in answerer.reading.read(reader, tokens, position, is_last=True):
            last.update(hidden)
        self.x, self.kept = last.x[:, None], self.reader.kept()

    @torch.no_grad()
    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Return the logits of each row's next token."""
        if so_far.shape[1]:
            (hidden,) = self.reader.feed(so_far[:, -1:], self.last_position + so_far.shape[1])
            self.x = hidden.x[:, -1:]  # drained queries have left padding before it
        return self.family.logits(self.x)[:, 0]

    @torch.no_grad()
    def attention_trace(self) -> AttentionTrace:
        """Return the attention of each row's last query."""
        trace = mean_trace(self.reader.stack.attention_traces())
        assert trace is not None
        return trace


class EncoderDecoderAnswerer:
    """An encoder that reads the prompt into a memory of its last ``outputs`` positions, and a decoder that answers."""

    def __init__(self, family: T5Encoder, reading: ReadingConfig, outputs: int = 8192):
        self.family, self.reading, self.memory = family, reading, BoundedMemory(outputs, FIFO())

    def start(
        self, texts: list[list[int]], record_attention: bool = False, questions: list[list[int]] | None = None
    ) -> EncoderDecoderReading:
        """Read the beginnings of prompts as a batch."""
        empty = EncoderDecoderReading(self, self.reading.reader(self.family), None, [0] * len(texts))
        return empty.feed(texts)

    def read(self, prompts: list[list[int]], record_attention: bool = False) -> EncoderDecoderSession:
        """Read whole prompts as a batch."""
        return self.start([[]] * len(prompts), record_attention).ask(prompts)

    def write(self, entries: MemoryState | None, hidden: Hidden) -> MemoryState:
        """Return the memory of the encoder's outputs with those of a chunk."""
        return self.memory.update(entries or self.memory.empty((hidden.x,)), (hidden.x,), hidden.position)


class EncoderDecoderReading:
    """An encoder that has read texts of some ``lengths``, and the memory of its outputs; None: before the first."""

    def __init__(self, answerer: EncoderDecoderAnswerer, reader: LongReader, entries: MemoryState | None, lengths: list[int]):
        self.answerer, self.reader, self.entries, self.lengths = answerer, reader, entries, lengths

    def feed(self, parts: list[list[int]], texts: list[int] | None = None) -> EncoderDecoderReading:
        """Return the reading of ``parts`` after these texts, which stay as they are; None: one part for each."""
        texts, device = [*range(len(self.lengths))] if texts is None else texts, self.answerer.family.model.device
        reader, before = self.reader.fork(texts), [self.lengths[text] for text in texts]
        entries = self.entries and self.entries.take_rows(torch.tensor(texts, device=device))
        for hidden in reader.feed(*pad_prompts(parts, device, before)):
            entries = self.answerer.write(entries, hidden)
        lengths = [length + len(part) for length, part in zip(before, parts, strict=True)]
        return EncoderDecoderReading(self.answerer, reader, entries, lengths)

    def ask(self, questions: list[list[int]], texts: list[int] | None = None) -> EncoderDecoderSession:
        """Read on with a batch of questions about these texts; None: one for each."""
        whole = self.feed(questions, texts)
        for hidden in whole.reader.end(self.answerer.reading.ending):
            whole.entries = self.answerer.write(whole.entries, hidden)
        assert whole.entries is not None
        return EncoderDecoderSession(self.answerer.family, whole.entries, whole.reader.kept())


class EncoderDecoderSession:
    """A decoder that attends to an encoder's outputs."""

    def __init__(self, family: T5Encoder, entries: MemoryState, kept: list[Int[Tensor, "b m"]]):
        self.kept = kept
        order = entries.ranking.position.argsort(1)
        self.family, self.rows, self.device = family, len(order), order.device
        self.encoded = entries.columns[0].gather(1, order[..., None].expand_as(entries.columns[0]))
        self.position = entries.ranking.position.gather(1, order)
        self.start = torch.full_like(order[:, :1], family.model.config.decoder_start_token_id)

    @torch.no_grad()
    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Return the logits of each row's next token."""
        self.tokens = torch.cat([self.start, so_far], 1)
        return self.family.logits(self.tokens, self.encoded, self.position >= 0)[:, -1]

    @torch.no_grad()
    def attention_trace(self) -> AttentionTrace:
        """Return the cross-attention of the decoder's last position."""
        return AttentionTrace(self.family.cross_attention(self.tokens, self.encoded, self.position >= 0), self.position)


class LastOutput:
    """The stack's output at one position of each row, collected from the chunks that come through."""

    def __init__(self, position: Int[Tensor, " b"]):
        self.position = position
        self.x: Float[Tensor, "b e"]

    def update(self, hidden: Hidden) -> None:
        """Store the output of rows whose position is in this chunk."""
        if not hasattr(self, "x"):
            self.x = hidden.x.new_zeros(len(hidden.x), hidden.x.shape[-1])
        rows, cells = (hidden.position == self.position[:, None]).nonzero().unbind(1)
        self.x[rows] = hidden.x[rows, cells]


def pad_prompts(
    prompts: list[list[int]], device: Any, before: list[int] | None = None
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Return tokens and positions, padded on the right with token 0 at position -1.

    ``before`` are the numbers of tokens that precede the prompts; None: they begin at position 0.
    """
    width, starts = max(map(len, prompts)), before or [0] * len(prompts)
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], dtype=torch.long, device=device)
    place = torch.arange(width, device=device).expand_as(tokens)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return tokens, (place + torch.tensor(starts, device=device)[:, None]).masked_fill(place >= lengths[:, None], -1)


def greedy(session: AnswerSession, stop: int, longest: int) -> list[list[int]]:
    """Return the greedy continuation of each row, without ``stop`` and what follows it, at most ``longest`` tokens."""
    tokens = torch.empty(session.rows, 0, dtype=torch.long, device=session.device)
    done = torch.zeros(session.rows, dtype=torch.bool, device=session.device)
    while tokens.shape[1] < longest and not done.all():
        token = session.next_logits(tokens).argmax(-1)
        done |= token == stop
        tokens = torch.cat([tokens, token[:, None]], 1)
    return [row[: row.index(stop)] if stop in row else row for row in tokens.tolist()]
