"""Score a text, or continue it token by token, with the windows, memories and mixture of evaluation.

A window's tokens are encoded again for each new one, unless the backbone can go on from a cache of them; a full window is
written to the long memory and advances the state of a stateful backbone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trime.common.types import Contexts, Encoding, Float, LogMass, Tensor, TokenPosition
from trime.decoding.attribution import (
    Attribution,
    ExpertDistributions,
    expert_distributions,
    fitted_attribution,
    grid_attribution,
)
from trime.errors import UserError
from trime.layers.attention import AttentionTrace
from trime.models.network import Network
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec, scales
from trime.scoring.mixtures.experts import History, stack_masses
from trime.scoring.scorer import Scorer
from trime.token_memory.test.base import Entries, Memory, Window

LIKELIEST = 512  # tokens among which a nucleus is looked for before all are sorted


@dataclass(frozen=True)
class TokenSampler:
    """Choose the most probable token (``temperature`` 0), or sample from the smallest set with probability ``top_p`` in all."""

    temperature: float = 1.0
    top_p: float = 1.0
    excluded: tuple[int, ...] = ()  # never chosen

    def __call__(self, probability: Float[Tensor, " v"], generator: torch.Generator) -> int:
        if self.excluded:
            probability = probability.index_fill(0, torch.tensor(self.excluded, device=probability.device), 0)
        if not self.temperature:
            return int(probability.argmax())
        sharpened = (probability.log() / self.temperature).softmax(0).double().cpu()
        if self.top_p < 1:
            ordered, token = sharpened.topk(min(LIKELIEST, len(sharpened)))
            if ordered.sum() < self.top_p:
                ordered, token = sharpened.sort(descending=True)
            cumulative = ordered.masked_fill(ordered.cumsum(0) - ordered >= self.top_p, 0).cumsum(0)
        else:
            token, cumulative = torch.arange(len(sharpened)), sharpened.cumsum(0)
        drawn = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
        return int(token[torch.searchsorted(cumulative, drawn, right=True).clamp(max=len(token) - 1)])


@dataclass(frozen=True)
class WindowLengths:
    """Lengths in tokens: a window has ``block`` new ones, after up to ``context`` earlier ones."""

    block: int
    context: int


class AttributedToken(NamedTuple):
    """A generated token, the attribution of the distribution it was chosen from, and the entries of each memory."""

    token: int
    attribution: Attribution
    entries: dict[str, Entries]
    attention: AttentionTrace | None = None  # of layers that attend to earlier segments


class Started(NamedTuple):
    """A window that a backbone can go on with: its inputs so far, their encoding, and the backbone's cache of them."""

    begin: int
    inputs: list[int]
    encoding: Encoding
    cache: Any


class Continuation:
    """A text that grows, with the model, memories and mixture of one row of a table."""

    def __init__(
        self,
        network: Network,
        row: MixtureSpec | FittedMixtureSpec,
        memories: dict[str, Memory],
        windows: WindowLengths,
        start: int,
        vocabulary: int,
        scaled_interpolation: bool = True,
    ):
        self.network, self.row, self.memories = network, row, memories
        self.windows, self.start, self.scaled_interpolation = windows, start, scaled_interpolation
        self.vocabulary = vocabulary  # number of tokens: an output layer may have more rows
        self.device = next(network.parameters()).device
        network.record_attention()
        self.restart()

    def restart(self) -> None:
        """Forget the text, also in the memories, and begin another one, with every memory."""
        self.silent: frozenset[str] = frozenset()  # memories that propose nothing
        self.tokens: list[int] = []
        self.state = None  # of the backbone, after the previous windows
        self.started: Started | None = None
        self.mixture = self.row.mixture_on(self.device) if isinstance(self.row, FittedMixtureSpec) else None
        self.history = History(self.mixture.decays) if self.mixture else None
        self.history_length = 0  # tokens that the history has seen
        self.experts: ExpertDistributions | None = None  # for the next token
        for memory in self.memories.values():
            memory.reset()

    @torch.no_grad()
    def read(self, tokens: list[int]) -> None:
        for remaining, token in zip(range(len(tokens), 0, -1), tokens, strict=True):
            if self.history and self.experts is not None and self.history_length == len(self.tokens):
                self.history.features(0, self.experts.log_probability(token)[None].float())
                self.history_length += 1
            self.tokens.append(token)
            self.experts = None
            if len(self.tokens) % self.windows.block == 0:
                self.close_window(skip_history=remaining > 2 * self.windows.block and self.history_decays)

    @property
    def history_decays(self) -> bool:
        """True where the history of a window has no influence a window later."""
        return self.mixture is not None and max(self.mixture.decays, default=0) ** self.windows.block < 1e-9

    @property
    def first(self) -> int:  # the position of the first new token of the current window
        return len(self.tokens) // self.windows.block * self.windows.block

    def encode_window(self, first: int, at_once: bool = False) -> Window:
        """Encode the window whose new tokens begin at ``first``; the target of the text's last token is unknown (-1).

        ``at_once``: as a whole, so that a stateful backbone's next state is known.
        """
        begin = max(0, first - self.windows.context)
        inputs = [self.tokens[begin - 1] if begin else self.start, *self.tokens[begin:]]
        targets = [*self.tokens[begin:], -1]
        length = min(len(inputs), first + self.windows.block - begin)
        number = first // self.windows.block
        if self.network.has_cache and not at_once:
            encoding = self.go_on(begin, inputs[:length], number)
        else:
            encoding, self.next_state = encode(self.network, inputs[:length], number, self.state)
        self.f, contexts = encoding.f, contexts_at(encoding, targets[:length], begin, number)
        zeros = contexts.g.new_zeros(length - (first - begin))
        return Window(contexts, first - begin, LogMass(zeros, zeros))

    def go_on(self, begin: int, inputs: list[int], number: int) -> Encoding:
        """Return the encoding of a window's inputs; only inputs that the last call did not have are computed."""
        old = self.started
        if old is None or old.begin != begin or inputs[: len(old.inputs)] != old.inputs:
            nothing = torch.zeros(0, device=self.device)
            old = Started(begin, [], Encoding(nothing, nothing), self.network.backbone.new_cache())
        if new := inputs[len(old.inputs) :]:
            added, _ = encode(self.network, new, number, self.state, old.cache)
            f, g = (torch.cat(pair) for pair in zip(old.encoding, added, strict=True))
            old = Started(begin, inputs, Encoding(f, g), old.cache)
        self.started = old
        return old.encoding

    def close_window(self, skip_history: bool = False) -> None:
        """Write the new contexts of a full window to the memories, and update the history unless ``skip_history``."""
        filling = [memory for memory in self.memories.values() if memory.state_scope]
        if not (filling or self.network.is_stateful or (self.history and not skip_history)):
            self.history_length = len(self.tokens)
            return
        window = self.encode_window(len(self.tokens) - self.windows.block, at_once=self.network.is_stateful)
        if self.network.is_stateful:
            self.state = self.next_state
        if self.history and not skip_history:
            self.update_history(window)
        else:
            self.history_length = len(self.tokens)
        for memory in filling:
            memory.write(window)

    def update_history(self, window: Window) -> None:
        """Add the window's tokens that the history has not seen."""
        assert isinstance(self.row, FittedMixtureSpec) and self.history
        targets = window.query.token
        mass = self.network.vocabulary_mass(self.f[window.num_context : window.num_context + len(targets)], targets)
        divisors = self.row.divisors(*scales(window.contexts.g.shape[1], self.scaled_interpolation))
        divisor = window.contexts.g.new_tensor(divisors)
        masses = {name: self.memories[name].experts(window, divisor) for name in self.row.memory_order}
        largest = {name: LogMass(memory.target[-1:], memory.total[-1:]) for name, memory in masses.items()}  # memory size
        expert_masses = stack_masses(mass, largest, window.query.positions.document)
        self.history.features(0, expert_masses.log_probability[max(self.history_length - window.scored_from, 0) :])
        self.history_length = window.scored_from + len(targets)

    @torch.no_grad()
    def next(self) -> tuple[Attribution, dict[str, Entries]]:
        """Return the attributed distribution of the next token, and the entries of the memories."""
        window = self.encode_window(self.first)
        if self.history and self.history_length < len(self.tokens):
            self.update_history(window._replace(contexts=window.contexts.take(slice(0, -1))))
        entries = {name: self.memories[name].entries(window) for name in sorted(self.row.memories)}
        entries |= {name: without_entries(entries[name]) for name in self.silent & entries.keys()}
        any_token = torch.zeros(1, dtype=torch.long, device=self.device)
        mass = self.network.vocabulary_mass(self.f[-1:], any_token)
        vocabulary = self.network.head.log_probs(self.f[-1:])[0].double() + mass.total.double()
        width = window.contexts.g.shape[1]
        if isinstance(self.row, MixtureSpec):
            return grid_attribution(self.row, vocabulary, entries, width, self.scaled_interpolation, mass.gate), entries
        self.experts = expert_distributions(self.row, vocabulary, entries, width, self.scaled_interpolation)
        assert self.mixture is not None and self.history
        total = self.experts.total[None].float()
        # The features are those before the next token, which is not known yet and enters a copy of the history.
        features = copy.deepcopy(self.history).features(0, torch.zeros_like(total))
        return fitted_attribution(self.row, self.experts, self.mixture.log_weights(total, features)[0]), entries

    def generate(self, count: int, sampler: TokenSampler, seed: int) -> Iterator[AttributedToken]:
        generator, text = torch.Generator().manual_seed(seed), self.tokens
        for _ in range(count):
            if self.tokens is not text:
                raise UserError(
                    "another text was begun while this one was written: write it to its end first, or load it twice"
                )
            attribution, entries = self.next()
            token = sampler(attribution.probability[: self.vocabulary], generator)
            yield AttributedToken(token, attribution, entries, self.network.attention_trace())
            self.read([token])


class TextScorer:
    """Scores texts, each with memories that have read no other text; ``start`` is the input before the first token."""

    def __init__(
        self,
        network: Network,
        row: MixtureSpec | FittedMixtureSpec,
        memories: Mapping[str, Memory],
        windows: WindowLengths,
        start: int,
        scaled_interpolation: bool = True,
    ):
        self.network, self.lengths, self.start = network, windows, start
        self.scorer = Scorer([row], memories, scaled_interpolation)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> Iterator[tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]]:
        """Yield, window by window, the log-probability of each token, and the contributions of the memories to it."""
        for scored in self.scorer.score_row(self.windows(tokens)):
            yield scored.log_probability, scored.contributions()

    def windows(self, tokens: list[int]) -> Iterator[Window]:
        """Yield a text as windows of ``block`` tokens to be scored, after up to ``context`` earlier ones, with their masses."""
        state = None
        for number, first in enumerate(range(0, len(tokens), self.lengths.block)):
            begin = max(0, first - self.lengths.context)
            targets = tokens[begin : first + self.lengths.block]
            inputs = [tokens[begin - 1] if begin else self.start, *targets[:-1]]
            encoding, state = encode(self.network, inputs, number, state)
            contexts = contexts_at(encoding, targets, begin, number)
            mass = self.network.vocabulary_mass(encoding.f[first - begin :], contexts.token[first - begin :])
            yield Window(contexts, first - begin, mass)


def encode(network: Network, inputs: list[int], number: int, state: Any, kept: Any = None) -> tuple[Encoding, Any]:
    """Return the encoding [n e] of some inputs of window ``number`` of a text, and the backbone's state after them.

    ``kept``: the backbone's cache of the window's inputs before these.
    """
    device = next(network.parameters()).device
    tokens, fresh = torch.tensor([inputs], device=device), torch.tensor([number == 0], device=device)
    encoding, state = network(tokens, state, fresh, *([] if kept is None else [kept]))  # not every backbone has a cache
    return Encoding(encoding.f[0], encoding.g[0]), state


def contexts_at(encoding: Encoding, targets: list[int], begin: int, number: int) -> Contexts:
    """Return the contexts of window ``number`` of document 0, from position ``begin`` on."""
    g = encoding.g.float()
    position = torch.arange(begin, begin + len(g), device=g.device)
    positions = TokenPosition(torch.zeros_like(position), torch.full_like(position, number), position)
    return Contexts(g, torch.tensor(targets, device=g.device), positions)


def without_entries(entries: Entries) -> Entries:
    """Return the entries of a memory as those of an empty one."""
    counts = None if entries.counts is None else torch.full_like(entries.counts, -torch.inf)
    return entries._replace(similarity=torch.full_like(entries.similarity, -torch.inf), counts=counts)


def top_attention(step: AttributedToken, count: int) -> list[tuple[str, float, int]]:
    """Return the most attended tokens in the form of ``top_entries``; position 0, the start symbol, is left out."""
    best = step.attention.top(count + 1) if step.attention else []
    return [("attention", share, position - 1) for share, position in best if position][:count]


def top_entries(step: AttributedToken, count: int) -> list[tuple[str, float, int]]:
    """Return the entries that contribute most to a step's token: memory, share of its probability, source."""
    contributions = [
        (name, float(weight[entry]), int(entries.source[entry]))
        for name, entries in step.entries.items()
        for weight in (step.attribution.weights[name].masked_fill(entries.token != step.token, 0),)
        for entry in weight.topk(min(count, len(weight))).indices.tolist()
    ]
    ranked = sorted((one for one in contributions if one[1] > 0), key=lambda one: -one[1])
    largest = max(step.entries, key=lambda name: float(step.attribution.parts[name][step.token]), default=None)
    # The largest memory's mass may be spread thinly, with larger single entries in others: one of it is always shown.
    best = [one for one in ranked if one[0] == largest][:1]
    chosen = [*best, *(one for one in ranked if one not in best)][:count]
    return sorted(chosen, key=lambda one: one[0] != largest)


def agreeing_entries(step: AttributedToken) -> dict[str, tuple[int, int]]:
    """Return for each memory how many of its entries hold a step's token, and how many it has."""
    counts = {}
    for name, entries in step.entries.items():
        filled = entries.similarity > -torch.inf
        counts[name] = int((filled & (entries.token == step.token)).sum()), int(filled.sum())
    return counts
