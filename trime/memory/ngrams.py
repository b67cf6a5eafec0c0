"""n-grams as memories at test: what followed the last k tokens in the training text, or in the document read so far.

Each length k of the context (its *order*) is an expert: P(w) = count(last k tokens, w) / count(last k tokens). The training
text is searched by a suffix array, so that a context may be as long as one likes (infini-gram, Liu et al. 2024).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from trime.memory.base import Entries, Memory, Window
from trime.memory.ngrams_cpu import counts_in_document, counts_in_text, rehash, suffix_range
from trime.types import Float, Mass, Tensor

INITIAL_SLOTS = 2**10  # slots of a table of counts
MAX_OCCURRENCES = 2**16  # occurrences of a context that generation looks at, evenly chosen


class SuffixArray:
    """A text [n] and the order of its suffixes [n]; ``starts`` [v + 1]: where those begin that start with each token."""

    def __init__(self, text: np.ndarray, order: np.ndarray, starts: np.ndarray):
        self.text, self.order, self.starts = text, order, starts

    @staticmethod
    def build(tokens: np.ndarray, vocabulary: int) -> SuffixArray:
        """Return the suffix array of a text; seconds for a million tokens, 9 bytes of memory a token."""
        from pydivsufsort import divsufsort

        text = np.array(tokens)  # the library refuses one that is read-only, as memory-mapped texts are
        starts = np.concatenate([[0], np.cumsum(np.bincount(text, minlength=vocabulary))])
        return SuffixArray(text, divsufsort(text), starts.astype(np.int64))


class RecentTokens:
    """The last tokens of a document, as windows are read."""

    def __init__(self, limit: int):
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        self.document, self.end, self.tokens = -1, -1, np.zeros(0, np.int64)

    def before(self, window: Window) -> np.ndarray:
        """Return the tokens before a window's first scored context: its own context, and what was read before that."""
        contexts = window.contexts
        own = contexts.token[: window.context].cpu().numpy().astype(np.int64)
        if len(own) >= self.limit:
            return own[len(own) - self.limit :]
        document, begin = int(contexts.place.document[0]), int(contexts.place.position[0])
        if document != self.document or not self.end - len(self.tokens) <= begin <= self.end:
            return own
        return np.concatenate([self.tokens[: len(self.tokens) - (self.end - begin)], own])

    def add(self, window: Window) -> None:
        """Read the scored tokens of a window."""
        before = self.before(window)
        self.tokens = np.concatenate([before, next_tokens(window)])[-self.limit :]
        self.document = int(window.contexts.place.document[0])
        self.end = int(window.contexts.place.position[-1]) + 1


def next_tokens(window: Window) -> np.ndarray:
    """Return the tokens that followed a window's scored contexts."""
    return window.scored.token.cpu().numpy().astype(np.int64)


class Ngrams(Memory):
    """``orders``: lengths of contexts, rising. Counts have no temperature: ``evidence`` is of the longest known context."""

    fills = True

    def __init__(self, orders: list[int]):
        if not orders or sorted(set(orders)) != list(orders) or orders[0] < 1:
            raise ValueError(f"orders={list(orders)}: lengths of contexts must be positive and rising")
        self.orders = np.array(orders, np.int64)
        self.expert_names = [str(order) for order in orders]
        self.read = RecentTokens(int(self.orders[-1]))

    def reset(self) -> None:
        self.read.forget()

    def write(self, window: Window) -> None:
        self.read.add(window)

    @abstractmethod
    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each order's context occurs before the target, and in all: [e n] each."""

    def experts(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        of_target, total = (torch.as_tensor(part).to(window.contexts.g).log()[None] for part in self.context_counts(window))
        return Mass(of_target, total)

    def evidence(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        every = self.experts(window, divisor)
        known = every.total[0].isfinite().sum(0)  # a context that is known is so without its first tokens
        longest = (known - 1).clamp(min=0)[None]
        chosen = [part[0].gather(0, longest).expand(len(divisor), -1)[None] for part in (every.target, every.total)]
        return Mass(*chosen)

    def entries(self, window: Window) -> Entries:
        """Return every token that followed, with its log-count under each order, and a place where it followed the longest."""
        found = self.continuations(window)
        token, column = np.unique(np.concatenate([tokens for tokens, _ in found] or [np.zeros(0)]), return_inverse=True)
        counts, place = np.zeros((len(self.orders), len(token))), np.zeros(len(token), np.int64)
        for number, (columns, (_, places)) in enumerate(zip(split(column, found), found, strict=True)):
            counts[number] = np.bincount(columns, minlength=len(token))
            place[columns] = places
        longest = counts[max(int(counts.any(1).sum()) - 1, 0)]
        device = window.contexts.g.device
        logs = [torch.as_tensor(part).to(device).log() for part in (longest, counts)]
        return Entries(logs[0], torch.as_tensor(token).long().to(device), torch.as_tensor(place).to(device), logs[1])

    @abstractmethod
    def continuations(self, window: Window) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each order the tokens that followed the context of a window's last token, and where they stand."""


def split(column: np.ndarray, found: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return what was joined, part by part."""
    return np.split(column, np.cumsum([len(tokens) for tokens, _ in found])[:-1]) if found else []


class TextNgrams(Ngrams):
    """n-grams of the training text."""

    def __init__(self, suffixes: SuffixArray, orders: list[int]):
        super().__init__(orders)
        self.array = suffixes

    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        before, target = self.read.before(window), window.query.token.cpu().numpy().astype(np.int64)
        history, array = np.concatenate([before, next_tokens(window)]), self.array
        of_target, total = np.zeros((2, len(self.orders), len(target)), np.int64)
        arguments = array.text, array.order, array.starts, history, len(before), target, self.orders
        counts_in_text(*arguments, of_target, total)
        return of_target, total

    def continuations(self, window: Window) -> list[tuple[np.ndarray, np.ndarray]]:
        history, array = np.concatenate([self.read.before(window), next_tokens(window)[:-1]]), self.array
        found = []
        for order in self.orders[self.orders <= len(history)].tolist():
            begin = len(history) - order
            low, high = suffix_range(array.text, array.order, array.starts, history, begin, order)
            if high - low > MAX_OCCURRENCES:
                places = np.asarray(array.order[np.linspace(low, high - 1, MAX_OCCURRENCES).astype(np.int64)]) + order
            else:
                places = np.asarray(array.order[low:high]) + order
            places = places[places < len(array.text)]
            found.append((np.asarray(array.text[places]), places))
        return found

    @property
    def bytes(self) -> int:
        return int(self.array.text.nbytes + self.array.order.nbytes + self.array.starts.nbytes)


class DocumentNgrams(Ngrams):
    """n-grams of the document, up to each token. Two contexts with the same 63 bits of hash would share their counts."""

    remembers_all = True

    def __init__(self, orders: list[int]):
        super().__init__(orders)
        self.clear()

    def reset(self) -> None:
        super().reset()
        self.clear()

    def clear(self) -> None:
        """Forget the document."""
        self.document, self.tokens = -1, np.zeros(0, np.int64)
        self.keys, self.counts, self.taken = np.zeros(INITIAL_SLOTS, np.uint64), np.zeros(INITIAL_SLOTS, np.int32), 0

    def begin(self, window: Window) -> None:
        """Forget another document than the window's."""
        document = int(window.contexts.place.document[0])
        if document != self.document:
            self.clear()
            self.document = document

    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Return counts that know the window's earlier tokens too; they are forgotten again until they are written."""
        self.begin(window)
        *found, added = self.count(window, window.query.token.cpu().numpy().astype(np.int64))
        np.subtract.at(self.counts, added, 1)
        return found[0], found[1]

    def write(self, window: Window) -> None:
        self.begin(window)
        tokens = next_tokens(window)
        self.taken += len(self.count(window, tokens)[2])
        self.tokens = np.concatenate([self.tokens, tokens])
        super().write(window)

    def count(self, window: Window, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the counts of targets and in all, and the slots of what followed, which is counted now."""
        before = self.read.before(window)
        added = np.zeros(2 * len(self.orders) * len(target), np.int64)
        self.make_room(len(added))
        of_target, total = np.zeros((2, len(self.orders), len(target)), np.int64)
        arguments = np.concatenate([before, next_tokens(window)]), len(before), target, self.orders
        done = counts_in_document(self.keys, self.counts, *arguments, of_target, total, added)
        return of_target, total, added[:done]

    def make_room(self, more: int) -> None:
        """Let the table grow, so that at most half of it is taken."""
        size = len(self.keys)
        while size < 2 * (self.taken + more):
            size *= 2
        if size > len(self.keys):
            keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
            self.taken = rehash(self.keys, self.counts, keys, counts)
            self.keys, self.counts = keys, counts

    def continuations(self, window: Window) -> list[tuple[np.ndarray, np.ndarray]]:
        own = next_tokens(window)[:-1]
        first = int(window.contexts.place.position[window.context]) - len(self.tokens)
        history = np.concatenate([self.tokens, own]) if not first else np.concatenate([self.read.before(window), own])
        found, places = [], np.arange(len(history))
        for number, order in enumerate(self.orders.tolist()):
            known = 0 if not number else self.orders[number - 1]
            for back in range(known, min(order, len(history))):
                places = places[places > back]
                places = places[history[places - 1 - back] == history[-1 - back]]
            found.append((history[places], places) if order <= len(history) else (history[:0], history[:0]))
        return found

    @property
    def bytes(self) -> int:
        return int(self.keys.nbytes + self.counts.nbytes)
