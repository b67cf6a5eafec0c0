"""A text memory behind an endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trime.common.pretrained import unwrapped
from trime.common.types import Bool, Float, Tensor
from trime.serving.served import Explained, Place, Prompt, Reading, Served, ServedToken, Wanted, Writing
from trime.text_memory.page import COLOURS, TITLES
from trime.text_memory.processor import MODEL, ExplainedToken
from trime.text_memory.prompts import prompts_of

# Tokens before, behind and in place of a gap, by family: Qwen and others, StarCoder, CodeLlama, CodeGemma.
GAPS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


class ServedMemory(Served):
    """A memory and its model, which continue texts and chats, and fill gaps where the model has learned to."""

    def __init__(self, memory: Any):  # a TextMemory, which makes one of these
        self.memory, self.decoder = memory, memory.decoder
        config = unwrapped(memory.decoder.model).config
        self.name = Path(str(getattr(config, "_name_or_path", "") or type(memory.decoder.model).__name__)).name
        self.colours = {name: COLOURS[name] for name in memory.memories}
        self.titles = TITLES
        self.longest = getattr(config, "max_position_embeddings", None)
        known = memory.decoder.tokenizer.get_vocab()
        self.gap = next(({name: known[name] for name in names} for names in GAPS if {*names} <= known.keys()), None)

    def tokens(self, prompt: Prompt) -> list[int]:
        return [int(token) for token in prompts_of(self.with_gap(prompt), self.decoder, heal=False)[0][0].tokens]

    def text(self, tokens: list[int]) -> str:
        return self.decoder.text_of(tokens)

    def infill(self, prompt: str, suffix: str) -> Prompt:
        if self.gap is None:
            return super().infill(prompt, suffix)
        before, behind, gap = self.gap.values()
        return [*self.decoder.start, before, *self.decoder.inside(prompt), behind, *self.decoder.inside(suffix), gap]

    def with_gap(self, prompt: Prompt) -> Prompt:
        """Return a prompt; one that spells the tokens of a gap, as editors send it, as the tokens that it means."""
        if self.gap is None or not isinstance(prompt, str):
            return prompt
        before, behind, gap = map(re.escape, self.gap)
        spelled = re.fullmatch(f"{before}(.*?){behind}(.*?){gap}", prompt, re.DOTALL)
        return self.infill(spelled[1], spelled[2]) if spelled else prompt

    def read(self, prompt: Prompt, wanted: Wanted, explained: int) -> Reading:
        tokens, served, sources = np.array(self.tokens(prompt)), list[ServedToken](), list[ExplainedToken]()
        # What the tokenizer puts before a text predicts its first token, and is not in it.
        begin = len(self.decoder.start) if isinstance(prompt, str) else 0
        if not begin:
            served.append(ServedToken(self.decoder.text_of(tokens[:1].tolist()), None, {}))
        for read in self.memory.read(tokens, begin or 1):
            served.append(self.served(self.text([read.token]), read.token, read.prediction.log_probability, wanted))
            if wanted.sources and len(read.before) >= len(tokens) - explained:
                sources.append(self.memory.explained(read, wanted.sources))
        return Reading(served, [as_explained(token) for token in self.memory.with_runs(sources, tokens)])

    def served(self, text: str, token: int, log_probability: Float[Tensor, " v"], wanted: Wanted) -> ServedToken:
        """Return a token with its log-probability in nats, and with as many of the likeliest tokens as are wanted."""
        return ServedToken.of(text, token, log_probability, wanted.likeliest, self.text)

    def write(self, prompt: Prompt, wanted: Wanted, take: Callable[[ServedToken, str], bool]) -> Writing:
        prompt = self.with_gap(prompt)
        (given,), _ = prompts_of(prompt, self.decoder)
        heard = Listener(self, given.end, wanted, take)
        sampled = {"do_sample": True, "temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": 0}
        if wanted.seed is None:
            torch.seed()
        else:
            torch.manual_seed(wanted.seed)
        self.memory.generate(
            prompt,
            wanted.max_tokens,
            expect=wanted.expected,
            streamer=heard,
            stopping_criteria=[heard],
            **(sampled if wanted.temperature else {}),
        )
        explained = list[Explained]()
        if wanted.sources and heard.tokens:
            whole = [*given.tokens.tolist(), *heard.tokens]
            (tokens,) = self.memory.explain(torch.tensor(whole), len(given.tokens), wanted.sources)
            explained = without_beginning([as_explained(token) for token in tokens], given.end)
        return Writing(heard.text, heard.ended, explained)


class Listener:
    """A streamer and a stopping criterion: it hands tokens on, and ends the text when nobody wants more."""

    def __init__(self, served: ServedMemory, end: str, wanted: Wanted, take: Callable[[ServedToken, str], bool]):
        self.served, self.given, self.wanted, self.take = served, end, wanted, take
        self.tokens: list[int] = []
        self.text, self.count, self.ended, self.is_done = "", 0, False, False
        decoder = served.decoder
        ends = decoder.model.generation_config.eos_token_id
        self.ends = {*(ends if isinstance(ends, list) else [ends]), decoder.tokenizer.eos_token_id}
        self.special = {*decoder.tokenizer.all_special_ids}

    def note(self, tokens: Tensor, log_probability: Float[Tensor, " v"]) -> None:
        """Hear of a token that was written, and of the distribution it was chosen from."""
        token = int(tokens)
        if self.is_done or token in self.ends:
            self.ended = self.ended or not self.is_done
            return
        self.tokens.append(token)
        text = self.served.decoder.text_of([each for each in self.tokens if each not in self.special])
        if self.given and len(text) <= len(self.given) and not self.count:
            return  # the prompt's last word is still written again
        text = text[len(self.given) :].rstrip("\N{REPLACEMENT CHARACTER}")
        new, self.text = text[len(self.text) :], text
        self.count += 1
        wants_more = self.take(self.served.served(new, token, log_probability, self.wanted), text)
        self.is_done = not wants_more or self.count >= self.wanted.max_tokens

    def put(self, tokens: Tensor) -> None:
        """Do nothing: ``note`` has heard of them."""

    def end(self) -> None:
        """Do nothing: ``generate`` returns."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Bool[Tensor, " b"]:
        return torch.full((len(input_ids),), self.is_done, device=input_ids.device)


def as_explained(token: ExplainedToken) -> Explained:
    """Return a token as the endpoint explains it."""
    parts = {name: part for name, part in token.parts.items() if name != MODEL}
    sources = [Place(memory, source.name, source.line, text) for memory, source, text in token.sources]
    return Explained(token.text, token.probability, parts, sources, token.run and token.run.to_json())


def without_beginning(tokens: list[Explained], given: str) -> list[Explained]:
    """Return explained tokens without those, and without the part of one, that write a prompt's last word again."""
    left = given
    while left and tokens:
        text = tokens[0].text
        tokens = ([tokens[0]._replace(text=text[len(left) :])] if len(text) > len(left) else []) + tokens[1:]
        left = left[len(text) :]
    return tokens
