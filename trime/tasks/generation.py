"""Continues a text token by token: windows, memories and mixture are those of evaluation, so that its probabilities are too.

A window's tokens are read again for each new one; a window that is full goes into the long memory, and what the rows of
a backbone carry goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trime.memory.datastore import Nearest
from trime.memory.recent import Recent
from trime.memory.selective import Selective
from trime.memory.similarity import similarity
from trime.models.looked import Looked
from trime.models.network import Network
from trime.tasks.rows import Row, scales
from trime.tasks.spread import Entries, Spread, spread
from trime.types import Contexts, Float, Place, Tensor


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen: the likeliest (``temperature`` 0), or drawn from the smallest set that holds ``top_p``."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __call__(self, probability: Float[Tensor, " v"], generator: torch.Generator) -> int:
        """A token."""
        if not self.temperature:
            return int(probability.argmax())
        sharpened = (probability.log() / self.temperature).softmax(0)
        ordered, token = sharpened.sort(descending=True)
        kept = ordered.masked_fill(ordered.cumsum(0) - ordered >= self.top_p, 0)
        return int(token[torch.multinomial(kept.cpu(), 1, generator=generator)])


@dataclass(frozen=True)
class Windows:
    """``block`` tokens are new in a window; up to ``context`` earlier ones stand before them."""

    block: int
    context: int


class Step(NamedTuple):
    """A token, how its probability came about, and the entries of each memory."""

    token: int
    spread: Spread
    found: dict[str, Entries]
    looked: Looked | None = None  # where attention went in layers that carry something on


class Continuation:
    """A text, and what a row of a table knows when its next token is due."""

    def __init__(
        self,
        network: Network,
        row: Row,
        recent: Recent | Selective | None,
        nearest: Nearest | None,
        windows: Windows,
        start: int,
        vocabulary: int,
        scaled_interpolation: bool = True,
        metric: str = "ip",
    ):
        self.network, self.row, self.recent, self.nearest = network, row, recent, nearest
        self.windows, self.start, self.scaled, self.metric = windows, start, scaled_interpolation, metric
        self.vocabulary = vocabulary  # an output layer may have more rows
        self.device = next(network.parameters()).device
        self.tokens: list[int] = []
        network.tell()
        self.state = None  # what the backbone carries from the windows before

    @torch.no_grad()
    def read(self, tokens: list[int]) -> None:
        """Adds known tokens."""
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) % self.windows.block == 0:
                self.close()

    @property
    def first(self) -> int:
        """The first new token of this window."""
        return len(self.tokens) // self.windows.block * self.windows.block

    def encoded(self, first: int) -> Contexts:
        """The contexts of the window whose new tokens begin at ``first``, the last one's token unknown (-1) where it is due."""
        begin = max(0, first - self.windows.context)
        given = [self.tokens[begin - 1] if begin else self.start, *self.tokens[begin:]]
        followed = [*self.tokens[begin:], -1]
        length = min(len(given), first + self.windows.block - begin)
        inputs = torch.tensor([given[:length]], device=self.device)
        fresh = torch.tensor([first == 0], device=self.device)
        encoding, self.after = self.network.backbone(inputs, self.state, fresh)
        self.f = encoding.f[0]
        position = torch.arange(begin, begin + length, device=self.device)
        place = Place(torch.zeros_like(position), torch.full_like(position, first // self.windows.block), position)
        return Contexts(encoding.g[0].float(), torch.tensor(followed[:length], device=self.device), place)

    def close(self) -> None:
        """Ends a full window: its new contexts go into the long memory."""
        if self.recent is None and not self.network.carries:
            return
        first = len(self.tokens) - self.windows.block
        contexts = self.encoded(first)
        if self.network.carries:
            self.state = self.after
        if self.recent is not None:
            overlap = len(contexts.token) - self.windows.block
            scored = contexts.take(slice(overlap, None))
            divisor = scored.g.new_tensor([scales(scored.g.shape[1], True)[0]])
            self.recent.evidence(scored, divisor, overlap=overlap)  # their attention decides what a policy keeps
            self.recent.write(scored, overlap=len(contexts.token))

    @torch.no_grad()
    def next(self) -> tuple[Spread, dict[str, Entries]]:
        """The probability of the next token, and what the memories show."""
        first = self.first
        contexts = self.encoded(first)
        query, local = contexts.take(slice(-1, None)), contexts.take(slice(0, -1))
        found = {name: self.shown(name, query, local, first) for name in sorted(self.row.memories)}
        some = torch.zeros(1, dtype=torch.long, device=self.device)
        mass = self.network.vocabulary_mass(self.f[-1:], some)
        vocabulary = self.network.head.log_probs(self.f[-1:])[0].double() + mass.total.double()  # type: ignore[operator]
        return spread(self.row, vocabulary, found, query.g.shape[1], self.scaled, mass.gate), found

    def shown(self, name: str, query: Contexts, local: Contexts, first: int) -> Entries:
        """What a memory shows to a context."""
        if name == "external" and self.nearest is not None:
            score, token, number = self.nearest.entries(query)
            return Entries(score[0], token[0], number[0].to(token.device))
        seen = local
        if name == "long" and self.recent is not None:
            seen = self.recent.entries(query, overlap=first - int(local.place.position[0]) if len(local.token) else 0)
        return Entries(similarity(query.g, seen.g.to(query.g), self.metric)[0], seen.token, seen.place.position)

    def generate(self, count: int, choice: Choice, seed: int, stop: int | None = None) -> Iterator[Step]:
        """Up to ``count`` tokens, or as far as ``stop``."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            found, entries = self.next()
            token = choice(found.whole[: self.vocabulary], generator)
            yield Step(token, found, entries, self.network.looked())
            if token == stop:
                return
            self.read([token])


def attended(step: Step, count: int) -> list[tuple[str, float, int]]:
    """The tokens to which attention gave most, as ``strongest`` has entries; position 0 is the start before them all."""
    best = step.looked.best(count + 1) if step.looked else []
    return [("attention", share, position - 1) for share, position in best if position][:count]


def strongest(step: Step, count: int) -> list[tuple[str, float, int]]:
    """The entries that gave most to a step's token: memory, share of its probability, place."""
    every = [
        (name, float(weight[entry]), int(entries.place[entry]))
        for name, entries in step.found.items()
        for weight in (step.spread.weights[name].masked_fill(entries.token != step.token, 0),)
        for entry in weight.topk(min(count, len(weight))).indices.tolist()
    ]
    return sorted((own for own in every if own[1] > 0), key=lambda own: -own[1])[:count]
