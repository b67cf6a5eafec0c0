"""Answers to long prompts: read with memories, then decoded greedily (Attendre sections 3.3 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trime.common.types import Float, Int, Tensor
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.kv.eviction.fifo import FIFO
from trime.kv.reader import Hidden, LongReader
from trime.kv.recall.store import Recall
from trime.kv.rope import RopeDecoder
from trime.kv.t5 import T5Encoder


@dataclass(frozen=True)
class ReadingConfig:
    """Settings of reading prompts: a memory for each layer, the chunk size, and flush or drain at the end."""

    memories: list[Attendre]
    chunk: int = 128
    end: str = "flush"
    # chunked: entries are evicted chunk by chunk. whole: a part of a prompt, such as the text before the question, is read with
    # everything kept, then memories are cut to their sizes, as prompt compression does. guided: after each chunk the question,
    # which is known by then, attends to all that is kept, and decides what goes next (Finch, Corallo and Papotti 2024).
    prefill: str = "chunked"
    per_head: bool = False  # each head of keys evicts for itself
    recall: Recall | None = None  # what queries get back of what was evicted


class Answerer:
    """A model that reads prompts with memories and then answers; of what it reads it keeps the last ``outputs`` positions."""

    def __init__(self, family: Any, reading: ReadingConfig, outputs: int, session: Callable[[Any, Reading], AnswerSession]):
        self.family, self.reading, self.outputs, self.session = family, reading, BoundedMemory(outputs, FIFO()), session

    def start(
        self, texts: list[list[int]], record_attention: bool = False, questions: list[list[int]] | None = None
    ) -> Reading:
        """Read the beginnings of prompts, of any lengths, as a batch; ``questions``, how they go on, may guide it."""
        settings = self.reading
        if settings.prefill != "guided":
            questions = None
        elif questions is None:
            raise ValueError("prefill=guided needs the questions before the texts are read: pass start(texts, questions=…)")
        records = record_attention and self.family.causal  # an answer after an encoder attends to its outputs alone
        reader = LongReader(self.family, settings.memories, settings.chunk, records, settings.per_head, settings.recall)
        reading = Reading(self, reader, [0] * len(texts))
        reading.read(texts, questions)
        return reading

    def read(self, prompts: list[list[int]], record_attention: bool = False) -> AnswerSession:
        return self.start([[]] * len(prompts), record_attention, prompts).ask(prompts)


class Reading:
    """Prompts that were read as far as ``lengths``; several questions may follow, each as if it were the first."""

    def __init__(self, answerer: Answerer, reader: LongReader, lengths: list[int], outputs: MemoryState | None = None):
        self.answerer, self.reader, self.lengths, self.outputs = answerer, reader, lengths, outputs

    def ask(self, questions: list[list[int]], texts: list[int] | None = None) -> AnswerSession:
        """Read on with a batch of questions about these texts (None: one for each); texts themselves are not read again."""
        rows = [*range(len(self.lengths))] if texts is None else texts
        outputs = self.outputs and self.outputs.take_rows(torch.tensor(rows, device=self.answerer.family.model.device))
        whole = Reading(self.answerer, self.reader.fork(rows), [self.lengths[row] for row in rows], outputs)
        whole.read(questions, is_last=True)
        return self.answerer.session(self.answerer.family, whole)

    def read(self, texts: list[list[int]], questions: list[list[int]] | None = None, is_last: bool = False) -> None:
        """Read on in each prompt, at last with the queries that still wait; ``questions`` guide it if given."""
        settings, cache = self.answerer.reading, self.reader.cache
        tokens, position = pad_prompts(texts, self.answerer.family.model.device, self.lengths)
        sizes = [memory.keys.size for memory in settings.memories]
        if settings.prefill == "whole":
            cache.resize([size + tokens.shape[1] for size in sizes])
        for number, hidden in enumerate(self.reader.feed(tokens, position), 1):
            self.note(hidden)
            if questions is not None:  # they see what is kept after this chunk, unless their text had ended before it
                end, device = number * settings.chunk, self.answerer.family.model.device
                asked, places = pad_prompts(questions, device, [min(len(text), end) for text in texts])
                had_ended = torch.tensor([len(text) <= end - settings.chunk for text in texts], device=device)
                self.reader.rescore_with_question(asked, places.masked_fill(had_ended[:, None], -1))
        if is_last:
            for hidden in self.reader.end(settings.end):
                self.note(hidden)
        if settings.prefill == "whole":
            cache.resize(sizes)
        self.lengths = [before + len(text) for before, text in zip(self.lengths, texts, strict=True)]

    def note(self, hidden: Hidden) -> None:
        """Keep the outputs of a chunk as far as there is room for them."""
        memory = self.answerer.outputs
        self.outputs = memory.update(self.outputs or memory.empty((hidden.x,)), (hidden.x,), hidden.position)


class AnswerSession:
    """Prompts that have been read, and their answers token by token."""

    def __init__(self, family: Any, reading: Reading):
        self.family, self.rows, self.device = family, len(reading.lengths), family.model.device
        self.reader, self.kept = reading.reader, reading.reader.cache.kept()  # by layer, positions of prompts; -1: empty

    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Return the logits of each row's next token; ``so_far`` grows by one token at a time."""
        raise NotImplementedError


class DecoderAnswerer(Answerer):
    """A decoder that reads the prompt and continues it; generated tokens do not wait."""

    def __init__(self, family: RopeDecoder, reading: ReadingConfig):
        super().__init__(family, reading, 1, DecoderSession)


class DecoderSession(AnswerSession):
    """A decoder that goes on after the last output of its prompts."""

    def __init__(self, family: RopeDecoder, reading: Reading):
        super().__init__(family, reading)
        assert reading.outputs is not None
        self.x, self.last_position = reading.outputs.columns[0], reading.outputs.ranking.position

    @torch.no_grad()
    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        if so_far.shape[1]:
            (hidden,) = self.reader.feed(so_far[:, -1:], self.last_position + so_far.shape[1])
            self.x = hidden.x[:, -1:]  # drained queries have left padding before it
        return self.family.logits(self.x)[:, 0]


class EncoderDecoderAnswerer(Answerer):
    """An encoder that reads the prompt into a memory of its last ``outputs`` positions, and a decoder that answers."""

    def __init__(self, family: T5Encoder, reading: ReadingConfig, outputs: int = 8192):
        super().__init__(family, reading, outputs, EncoderDecoderSession)


class EncoderDecoderSession(AnswerSession):
    """A decoder that attends to an encoder's outputs."""

    def __init__(self, family: T5Encoder, reading: Reading):
        super().__init__(family, reading)
        assert reading.outputs is not None
        (outputs,), position = reading.outputs.columns, reading.outputs.ranking.position
        order = position.argsort(1)
        self.encoded, self.position = outputs.gather(1, order[..., None].expand_as(outputs)), position.gather(1, order)
        self.start = torch.full_like(order[:, :1], family.model.config.decoder_start_token_id)

    @torch.no_grad()
    def next_logits(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        tokens = torch.cat([self.start, so_far], 1)
        return self.family.logits(tokens, self.encoded, self.position >= 0)[:, -1]


def pad_prompts(prompts: list[list[int]], device: Any, before: list[int]) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Return tokens and positions after ``before`` tokens, padded on the right with token 0 at position -1."""
    width = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], dtype=torch.long, device=device)
    place = torch.arange(width, device=device).expand_as(tokens)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return tokens, (place + torch.tensor(before, device=device)[:, None]).masked_fill(place >= lengths[:, None], -1)


def greedy(session: AnswerSession, stop: int, longest: int) -> list[list[int]]:
    """Return the greedy continuation of each row, without ``stop`` and what follows it, at most ``longest`` tokens."""
    tokens = torch.empty(session.rows, 0, dtype=torch.long, device=session.device)
    done = torch.zeros(session.rows, dtype=torch.bool, device=session.device)
    while tokens.shape[1] < longest and not done.all():
        token = session.next_logits(tokens).argmax(-1)
        done |= token == stop
        tokens = torch.cat([tokens, token[:, None]], 1)
    return [row[: row.index(stop)] if stop in row else row for row in tokens.tolist()]
