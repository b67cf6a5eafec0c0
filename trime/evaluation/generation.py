"""Continues a text token by token: windows, memories and mixture are those of evaluation, so that its probabilities are too.

A window's tokens are read again for each new one; a window that is full goes into the long memory, and what the rows of
a backbone carry goes on from there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trime.evaluation.attribution import Attribution, Experts, experts_of, fitted_spread, spread
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row, scales
from trime.memory.base import Entries, Memory, Window
from trime.mixtures.experts import Evidence, History, evidence_of
from trime.models.attention_trace import AttentionTrace
from trime.models.network import Network
from trime.types import Contexts, Float, Mass, Tensor, TokenPosition


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
    spread: Attribution
    found: dict[str, Entries]
    looked: AttentionTrace | None = None  # where attention went in layers that carry something on


class Continuation:
    """A text, and what a row of a table knows when its next token is due."""

    def __init__(
        self,
        network: Network,
        row: Row | FittedRow,
        memories: dict[str, Memory],
        windows: Windows,
        start: int,
        vocabulary: int,
        scaled_interpolation: bool = True,
    ):
        self.network, self.row, self.memories = network, row, memories
        self.windows, self.start, self.scaled = windows, start, scaled_interpolation
        self.vocabulary = vocabulary  # an output layer may have more rows
        self.device = next(network.parameters()).device
        self.tokens: list[int] = []
        network.tell()
        self.state = None  # what the backbone carries from the windows before
        self.mixture = row.mixture_on(self.device) if isinstance(row, FittedRow) else None
        self.history = History(self.mixture.decays) if self.mixture else None
        self.learned = copy.deepcopy(self.history)  # as of the windows that the mixture has learned from
        self.told = 0  # tokens that the history knows
        self.experts: Experts | None = None  # what was said of the token that is due
        for memory in memories.values():
            memory.reset()

    @torch.no_grad()
    def read(self, tokens: list[int]) -> None:
        """Adds known tokens."""
        for left, token in zip(range(len(tokens), 0, -1), tokens, strict=True):
            if self.history and self.experts is not None and self.told == len(self.tokens):
                self.history.features(0, self.experts.log_probability(token)[None].float())
                self.told += 1
            self.tokens.append(token)
            self.experts = None
            if len(self.tokens) % self.windows.block == 0:
                self.close(forgotten=left > 2 * self.windows.block and self.forgets)

    @property
    def forgets(self) -> bool:
        """What the history knows of a window does not matter a window later, and nothing else is learned from it."""
        if self.mixture is None or self.mixture.learns:
            return False
        return max(self.mixture.decays, default=0) ** self.windows.block < 1e-9

    @property
    def first(self) -> int:
        """The first new token of this window."""
        return len(self.tokens) // self.windows.block * self.windows.block

    def encoded(self, first: int) -> Window:
        """The window whose new tokens begin at ``first``, the last one's token unknown (-1) where it is due."""
        begin = max(0, first - self.windows.context)
        given = [self.tokens[begin - 1] if begin else self.start, *self.tokens[begin:]]
        followed = [*self.tokens[begin:], -1]
        length = min(len(given), first + self.windows.block - begin)
        inputs = torch.tensor([given[:length]], device=self.device)
        fresh = torch.tensor([first == 0], device=self.device)
        encoding, self.after = self.network.backbone(inputs, self.state, fresh)
        self.f = encoding.f[0]
        position = torch.arange(begin, begin + length, device=self.device)
        place = TokenPosition(torch.zeros_like(position), torch.full_like(position, first // self.windows.block), position)
        contexts = Contexts(encoding.g[0].float(), torch.tensor(followed[:length], device=self.device), place)
        none = contexts.g.new_zeros(length - (first - begin))
        return Window(contexts, first - begin, Mass(none, none))

    def close(self, forgotten: bool = False) -> None:
        """Ends a full window: its new contexts go into the memories that fill; ``forgotten``: the history need not know."""
        filling = [memory for memory in self.memories.values() if memory.fills]
        if not (filling or self.network.is_stateful or (self.history and not forgotten)):
            self.told = len(self.tokens)
            return
        window = self.encoded(len(self.tokens) - self.windows.block)
        if self.network.is_stateful:
            self.state = self.after
        if self.history and not forgotten:
            evidence = self.tell(window, self.memories)
            if self.mixture and self.learned and self.mixture.learns:  # window by window, as in evaluation
                self.mixture.learn(evidence, self.learned.features(0, evidence.log_probability))
        else:
            self.told = len(self.tokens)
            divisor = window.contexts.g.new_tensor([scales(window.contexts.g.shape[1], True)[0]])
            for memory in filling:
                memory.evidence(window, divisor)  # their attention decides what a policy keeps
        for memory in filling:
            memory.write(window)

    def tell(self, window: Window, memories: dict[str, Memory]) -> Evidence:
        """Let the history know what the experts said of a window's tokens that it does not know yet; return it of all."""
        assert isinstance(self.row, FittedRow) and self.history
        targets = window.query.token
        mass = self.network.vocabulary_mass(self.f[window.context : window.context + len(targets)], targets)
        divisor = window.contexts.g.new_tensor(self.row.divisors(*scales(window.contexts.g.shape[1], self.scaled)))
        every = {name: memories[name].experts(window, divisor) for name in self.row.joint}
        sized = {name: Mass(found.target[-1:], found.total[-1:]) for name, found in every.items()}
        evidence = evidence_of(mass, sized, window.query.place.document)
        self.history.features(0, evidence.log_probability[max(self.told - window.scored_from, 0) :])
        self.told = window.scored_from + len(targets)
        return evidence

    @torch.no_grad()
    def next(self) -> tuple[Attribution, dict[str, Entries]]:
        """The probability of the next token, and what the memories show."""
        window = self.encoded(self.first)
        if self.history and self.told < len(self.tokens):  # in copies of the memories, which this must not change
            read = window._replace(contexts=window.contexts.take(slice(0, -1)))
            self.tell(read, {name: copy.deepcopy(own) if own.fills else own for name, own in self.memories.items()})
        found = {name: self.memories[name].entries(window) for name in sorted(self.row.memories)}
        some = torch.zeros(1, dtype=torch.long, device=self.device)
        mass = self.network.vocabulary_mass(self.f[-1:], some)
        vocabulary = self.network.head.log_probs(self.f[-1:])[0].double() + mass.total.double()  # type: ignore[operator]
        width = window.contexts.g.shape[1]
        if isinstance(self.row, Row):
            return spread(self.row, vocabulary, found, width, self.scaled, mass.gate), found
        self.experts = experts_of(self.row, vocabulary, found, width, self.scaled)
        return self.weighed(self.row, self.experts), found

    def weighed(self, row: FittedRow, experts: Experts) -> Attribution:
        """The mixture of what the experts say."""
        assert self.mixture is not None and self.history
        unknown = experts.total.new_zeros(1, len(experts.total), dtype=torch.float)
        known = copy.deepcopy(self.history).features(0, unknown)  # before the token that is due
        return fitted_spread(row, experts, self.mixture.log_weights(experts.total[None].float(), known)[0])

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
