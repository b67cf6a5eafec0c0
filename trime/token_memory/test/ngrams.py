"""n-gram memories at test: tokens that followed the last k tokens in the training text, or in the document so far.

Each context length k (the *order*) is an expert: P(w) = count(last k tokens, w) / count(last k tokens). The training text
is searched by a suffix array, so that contexts may be of any length (infini-gram, Liu et al. 2024).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from trime.common.types import Float, LogMass, Tensor
from trime.errors import UserError
from trime.token_memory.test.base import Entries, Memory, StateScope, Window
from trime.token_memory.test.ngrams_cpu import counts_in_document, counts_in_text, rehash, suffix_range

INITIAL_SLOTS = 2**10  # slots of an empty hash table of counts
MAX_OCCURRENCES = 2**16  # occurrences of a context that generation reads at most, evenly chosen


class SuffixArray:
    """The documents of a text, each with a separator behind it [n], and the suffixes in sorted order [n].

    The separator is the largest symbol, so that no n-gram of two documents is found. Suffixes that begin with token v are
    ``starts[v]`` to ``starts[v + 1]``. The separators are at ``ends`` [d].
    """

    def __init__(self, text: np.ndarray, suffixes: np.ndarray, starts: np.ndarray, ends: np.ndarray):
        self.text, self.suffixes, self.starts, self.ends = text, suffixes, starts, ends

    @staticmethod
    def build(tokens: np.ndarray, vocabulary: int, offsets: np.ndarray | None = None) -> SuffixArray:
        """Return the suffix array of a text, of documents at ``offsets`` or of one; 9 bytes of memory a token."""
        from pydivsufsort import divsufsort

        after = np.array([len(tokens)]) if offsets is None else offsets[1:]
        text = np.insert(tokens.astype(np.min_scalar_type(vocabulary)), after, vocabulary)
        starts = np.concatenate([[0], np.cumsum(np.bincount(text, minlength=vocabulary + 1))])
        return SuffixArray(text, divsufsort(text), starts.astype(np.int64), after + np.arange(len(after)))

    def range_of(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the first of the suffixes that begin with some tokens, and the one after the last."""
        low, high = suffix_range(self.text, self.suffixes, self.starts, tokens, 0, len(tokens))
        return int(low), int(high)

    def token_numbers(self, places: np.ndarray) -> np.ndarray:
        """Return the number, counted without separators, of the token at each of some places."""
        return places - np.searchsorted(self.ends, places)


class RecentTokens:
    """The last ``limit`` tokens of the document that is being read."""

    def __init__(self, limit: int):
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        self.document, self.end, self.tokens = -1, -1, np.zeros(0, np.int64)

    def before(self, window: Window) -> np.ndarray:
        """Return the tokens before a window's first scored context: its unscored ones, and those read before the window."""
        contexts = window.contexts
        unscored = contexts.token[: window.num_context].cpu().numpy().astype(np.int64)
        if len(unscored) >= self.limit:
            return unscored[len(unscored) - self.limit :]
        document, begin = int(contexts.positions.document[0]), int(contexts.positions.position[0])
        if document != self.document or not self.end - len(self.tokens) <= begin <= self.end:
            return unscored
        return np.concatenate([self.tokens[: len(self.tokens) - (self.end - begin)], unscored])

    def add(self, window: Window) -> None:
        """Add the scored tokens of a window."""
        before = self.before(window)
        self.tokens = np.concatenate([before, next_tokens(window)])[-self.limit :]
        self.document = int(window.contexts.positions.document[0])
        self.end = int(window.contexts.positions.position[-1]) + 1


def next_tokens(window: Window) -> np.ndarray:
    """Return the tokens that followed a window's scored contexts."""
    return window.scored.token.cpu().numpy().astype(np.int64)


class Followers(NamedTuple):
    """The tokens that followed a context, and their positions; each has a number of ``occurrences``."""

    token: np.ndarray
    place: np.ndarray
    occurrences: float = 1.0


def places_of_contexts(history: np.ndarray, orders: np.ndarray) -> list[np.ndarray]:
    """Return for each of some rising orders the places that its last context, that many tokens, came before."""
    places, result, matched = np.arange(len(history)), [], 0
    # The places of a shorter context are narrowed down to those of the next.
    for order in orders.tolist():
        for back in range(matched, min(order, len(history))):
            places = places[places > back]
            places = places[history[places - 1 - back] == history[-1 - back]]
        matched = order
        result.append(places if order <= len(history) else places[:0])
    return result


class Ngrams(Memory):
    """n-grams of several context lengths; ``orders`` must rise, else UserError.

    Counts have no temperature: ``mass`` is that of the longest context that occurred.
    """

    state_scope = StateScope.DOCUMENT

    def __init__(self, orders: list[int]):
        if not orders or sorted(set(orders)) != list(orders) or orders[0] < 1:
            raise UserError(f"orders={list(orders)}: context lengths must be positive and rising")
        self.orders = np.array(orders, np.int64)
        self.expert_names = [str(order) for order in orders]
        self.recent_tokens = RecentTokens(int(self.orders[-1]))

    def reset(self) -> None:
        self.recent_tokens.forget()

    def write(self, window: Window) -> None:
        self.recent_tokens.add(window)

    @abstractmethod
    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Count how often the context of each order occurs before the target, and before any token: [e n] each."""

    def experts(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        of_target, total = (torch.as_tensor(counts).to(window.contexts.g).log()[None] for counts in self.context_counts(window))
        return LogMass(of_target, total)

    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        experts = self.experts(window, divisor)
        # A long context counts more than the shorter ones that it contains.
        known = experts.total[0].isfinite().sum(0)  # where a context occurs, its shorter suffixes do too
        longest = (known - 1).clamp(min=0)[None]
        masses = [mass[0].gather(0, longest).expand(len(divisor), -1)[None] for mass in (experts.target, experts.total)]
        return LogMass(*masses)

    def entries(self, window: Window) -> Entries:
        """Return each token that followed, with its log-count under each order and where it followed the longest."""
        followers = self.continuations(window)
        token, column = np.unique(np.concatenate([each.token for each in followers] or [np.zeros(0)]), return_inverse=True)
        counts, source = np.zeros((len(self.orders), len(token))), np.zeros(len(token), np.int64)
        edges = np.cumsum([0, *(len(each.token) for each in followers)])
        for number, each in enumerate(followers):
            columns = column[edges[number] : edges[number + 1]]
            counts[number] = np.bincount(columns, minlength=len(token)) * each.occurrences
            source[columns] = each.place
        longest = counts[max(int(counts.any(1).sum()) - 1, 0)]
        device = window.contexts.g.device
        logs = [torch.as_tensor(values).to(device).log() for values in (longest, counts)]
        return Entries(logs[0], torch.as_tensor(token).long().to(device), torch.as_tensor(source).to(device), logs[1])

    @abstractmethod
    def continuations(self, window: Window) -> list[Followers]:
        """Return for each order the tokens that followed the context of the window's last token."""


class TextNgrams(Ngrams):
    """n-grams of the training text."""

    def __init__(self, suffixes: SuffixArray, orders: list[int]):
        super().__init__(orders)
        self.array = suffixes

    def __deepcopy__(self, memo: dict[int, Any]) -> TextNgrams:
        """Return n-grams of the same text that have read nothing."""
        other = copy.copy(self)
        other.recent_tokens = RecentTokens(self.recent_tokens.limit)
        return other

    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        before, target = self.recent_tokens.before(window), window.query.token.cpu().numpy().astype(np.int64)
        history, array = np.concatenate([before, next_tokens(window)]), self.array
        of_target, total = np.zeros((2, len(self.orders), len(target)), np.int64)
        arguments = array.text, array.suffixes, array.starts, history, len(before), target, self.orders
        counts_in_text(*arguments, of_target, total)
        return of_target, total

    def continuations(self, window: Window) -> list[Followers]:
        history, array = np.concatenate([self.recent_tokens.before(window), next_tokens(window)[:-1]]), self.array
        followers = []
        for order in self.orders[self.orders <= len(history)].tolist():
            low, high = array.range_of(history[len(history) - order :])
            occurrences = max(1.0, (high - low) / MAX_OCCURRENCES)
            chosen = slice(low, high) if occurrences == 1 else np.linspace(low, high - 1, MAX_OCCURRENCES).astype(np.int64)
            places = np.asarray(array.suffixes[chosen]) + order
            tokens = np.asarray(array.text[places])
            inside = tokens < len(array.starts) - 2  # nothing follows the end of a document
            followers.append(Followers(tokens[inside], array.token_numbers(places[inside]), occurrences))
        return followers

    @property
    def bytes(self) -> int:
        return int(self.array.text.nbytes + self.array.suffixes.nbytes + self.array.starts.nbytes)


class DocumentNgrams(Ngrams):
    """n-grams of the document up to each token; contexts whose 63-bit hashes collide share their counts."""

    depends_on_whole_document = needs_text_order = True

    def __init__(self, orders: list[int]):
        super().__init__(orders)
        self.clear()

    def reset(self) -> None:
        super().reset()
        self.clear()

    def clear(self) -> None:
        self.document, self.tokens = -1, np.zeros(0, np.int64)
        self.keys, self.counts, self.taken = np.zeros(INITIAL_SLOTS, np.uint64), np.zeros(INITIAL_SLOTS, np.int32), 0

    def start_document(self, window: Window) -> None:
        """Clear the counts where a window is of another document."""
        document = int(window.contexts.positions.document[0])
        if document != self.document:
            self.clear()
            self.document = document

    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts, which include the window's earlier tokens; these are then removed until they are written."""
        self.start_document(window)
        of_target, total, added = self.count(window, window.query.token.cpu().numpy().astype(np.int64))
        np.subtract.at(self.counts, added, 1)  # a slot may have gone up several times
        return of_target, total

    def write(self, window: Window) -> None:
        self.start_document(window)
        tokens = next_tokens(window)
        self.taken += len(self.count(window, tokens)[2])
        self.tokens = np.concatenate([self.tokens, tokens])
        super().write(window)

    def count(self, window: Window, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count a window's tokens; return the counts before targets and before any token, and the slots that went up."""
        before = self.recent_tokens.before(window)
        added = np.zeros(2 * len(self.orders) * len(target), np.int64)
        self.make_room(len(added))
        of_target, total = np.zeros((2, len(self.orders), len(target)), np.int64)
        arguments = np.concatenate([before, next_tokens(window)]), len(before), target, self.orders
        done = counts_in_document(self.keys, self.counts, *arguments, of_target, total, added)
        return of_target, total, added[:done]

    def make_room(self, more: int) -> None:
        """Grow the table so that at most half of it is taken after ``more`` new entries."""
        size = len(self.keys)
        while size < 2 * (self.taken + more):
            size *= 2
        if size > len(self.keys):
            keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
            self.taken = rehash(self.keys, self.counts, keys, counts)
            self.keys, self.counts = keys, counts

    def continuations(self, window: Window) -> list[Followers]:
        current = next_tokens(window)[:-1]
        first = int(window.contexts.positions.position[window.num_context]) - len(self.tokens)
        before = self.recent_tokens.before(window) if first else self.tokens
        history = np.concatenate([before, current])
        return [Followers(history[found], found) for found in places_of_contexts(history, self.orders)]

    @property
    def bytes(self) -> int:
        return int(self.keys.nbytes + self.counts.nbytes)
