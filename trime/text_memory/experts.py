"""Predictions of the next token by n-grams of the stored texts, by n-grams of the text so far, and by neighbours.

Each context length of n-grams and each temperature of neighbours is an expert, with a mass and a distribution over tokens
(``trime.scoring.mixtures.experts``). Everything depends on the tokens so far and on the context of the last one alone, so that
a batch, beams or a text that is scored at once give the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from trime.common.types import Float, Int, LogMass, Tensor
from trime.scoring.mixtures.experts import ExpertMasses
from trime.text_memory.index import nearest
from trime.text_memory.segment import Segment, Source
from trime.token_memory.test.ngrams import SuffixArray, places_of_contexts
from trime.token_memory.test.ngrams_cpu import counts_in_document, counts_in_text, followers_of_contexts
from trime.token_memory.train.objective.blockwise_cpu import entry_masses

TEXT, DOCUMENT, NEIGHBOURS = "ngram", "document", "knn"
TEXT_ORDERS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24], np.int64)  # context lengths in tokens
DOCUMENT_ORDERS = np.array([1, 2, 3, 4, 6, 8, 12], np.int64)
TEMPERATURES = [0.02, 0.04, 0.08, 0.16]  # of cosines
NEAREST = 64  # neighbours of each context
SHORTEST = 8  # tokens of a copied run, at least


class Candidates(NamedTuple):
    """Tokens that an expert proposes as the next, each with its probability; a token may occur several times."""

    expert: np.ndarray  # [z] numbers of experts, the model's own being 0
    token: np.ndarray  # [z]
    probability: np.ndarray  # [z]


class Neighbours(NamedTuple):
    """The stored tokens whose contexts are nearest to each query, with the segment and the place of each."""

    similarity: Float[Tensor, "n k"]
    token: Int[Tensor, "n k"]
    segment: Int[Tensor, "n k"]
    place: Int[Tensor, "n k"]

    def of_row(self, row: int) -> Neighbours:
        return Neighbours(*(column[row : row + 1] for column in self))


class Run(NamedTuple):
    """Tokens in a row that are stored word for word: how many, and the place of the first."""

    tokens: int
    source: Source

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "file": self.source.name, "line": self.source.line}


class Hidden(NamedTuple):
    """Stored tokens that are left out: from one place to before another of a segment, whose n-grams ``array`` holds."""

    segment: int
    places: tuple[int, int]
    array: SuffixArray


class Experts:
    """The experts over some segments, but for what is ``hidden``; ``memories``: the names of those that take part, in order."""

    def __init__(self, segments: list[Segment], memories: tuple[str, ...], hidden: Hidden | None = None):
        self.segments, self.memories, self.hidden = segments, memories, hidden
        sizes = {TEXT: len(TEXT_ORDERS), DOCUMENT: len(DOCUMENT_ORDERS), NEIGHBOURS: len(TEMPERATURES)}
        self.sizes = {name: sizes[name] for name in memories}

    @property
    def counts(self) -> list[bool]:
        """Return for each expert whether its mass is a count."""
        return [False, *(name != NEIGHBOURS for name, size in self.sizes.items() for _ in range(size))]

    def chosen(self, masses: ExpertMasses, names: Collection[str]) -> tuple[ExpertMasses, list[bool]]:
        """Return the masses of the model and of some memories alone, and ``counts`` of these."""
        chosen = [True, *(name in names for name, size in self.sizes.items() for _ in range(size))]
        counts = [count for count, keep in zip(self.counts, chosen, strict=True) if keep]
        kept = torch.tensor(chosen)
        return ExpertMasses(masses.target[:, kept], masses.total[:, kept], masses.document), counts

    def masses(self, tokens: np.ndarray, query: Float[Tensor, "n d"], log_probability: Float[Tensor, " n"]) -> ExpertMasses:
        """Return the masses of all tokens of a text but the first, given their contexts and the model's log-probabilities."""
        target = torch.from_numpy(tokens[1:])
        masses = [LogMass(log_probability[None], log_probability.new_zeros(1, len(target)))]
        for name in self.memories:
            if name == NEIGHBOURS:
                found = self.nearest(query)
                assert found is not None
                masses.append(entry_masses(found.similarity, found.token, target, query.new_tensor(TEMPERATURES)))
            else:
                of_target, total = self.text_counts(tokens) if name == TEXT else document_counts(tokens)
                masses.append(LogMass(*(torch.from_numpy(count).float().log() for count in (of_target, total))))
        targets, totals = (torch.cat(part).T for part in zip(*((one.target, one.total) for one in masses), strict=True))
        return ExpertMasses(targets, totals, torch.zeros(len(target), dtype=torch.long))

    def text_counts(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Count how often the target follows each order's context in the stored texts, and how often any token does [e n]."""
        sums = np.zeros((2, len(TEXT_ORDERS), len(tokens) - 1), np.int64)
        arrays = [(segment.array, 1) for segment in self.segments] + ([(self.hidden.array, -1)] if self.hidden else [])
        for array, sign in arrays:
            counts = np.zeros_like(sums)
            counts_in_text(array.text, array.suffixes, array.starts, tokens, 1, tokens[1:], TEXT_ORDERS, *counts)
            sums += sign * counts
        return sums[0], sums[1]

    def nearest(self, query: Float[Tensor, "n d"]) -> Neighbours | None:
        """Return the nearest neighbours over all segments; None where no keys are kept."""
        if NEIGHBOURS not in self.memories:
            return None
        hidden = [(0, 0)] * len(self.segments)
        if self.hidden:
            hidden[self.hidden.segment] = self.hidden.places
        score, number, place = nearest([segment.index for segment in self.segments], query, NEAREST, hidden)
        token = np.zeros(place.shape, np.int64)
        for of, segment in enumerate(self.segments):
            own = number.numpy() == of
            token[own] = segment.token(place.numpy()[own])
        return Neighbours(score, torch.from_numpy(token), number, place)

    def next_token(self, tokens: np.ndarray, found: Neighbours | None) -> tuple[Float[Tensor, "1 e"], Candidates]:
        """Return the experts' log-masses after a text, and what they propose; ``found``: what ``nearest`` returned."""
        totals, proposed, first = [torch.zeros(1, dtype=torch.float32)], [], 1
        for name, size in self.sizes.items():
            if name == NEIGHBOURS:
                assert found is not None
                scores = found.similarity / found.similarity.new_tensor(TEMPERATURES)[:, None]
                total = scores.logsumexp(1)
                probability = (scores - total.nan_to_num(neginf=0)[:, None]).exp().numpy().ravel()
                order, token = np.repeat(np.arange(size), scores.shape[1]), np.tile(found.token[0].numpy(), size)
            else:
                order, token, count = self.text_followers(tokens) if name == TEXT else document_followers(tokens)
                sums = np.bincount(order, count, size)
                total, probability = torch.from_numpy(sums).float().log(), count / sums[order]
            totals.append(total)
            proposed.append((first + order, token, probability))
            first += size
        return torch.cat(totals)[None], Candidates(*(np.concatenate(column) for column in zip(*proposed, strict=True)))

    def text_followers(self, tokens: np.ndarray) -> np.ndarray:
        """Return what follows a text's contexts in the stored texts: the number of the order, the token, how often [3 z]."""
        arrays = [segment.array for segment in self.segments]
        found = [followers_of_contexts(each.text, each.suffixes, each.starts, tokens, TEXT_ORDERS) for each in arrays]
        return np.concatenate(found, 1)

    def sources(self, tokens: np.ndarray, target: int, limit: int, found: Neighbours | None) -> list[tuple[str, int, Source]]:
        """Return the places where a token followed like contexts: memory, segment, source; the longest and nearest first."""
        result: dict[tuple[str, int, int], tuple[str, int, Source]] = {}  # by place: a long context ends as a shorter one does
        if TEXT in self.memories:
            for order in sorted((order for order in TEXT_ORDERS.tolist() if order <= len(tokens)), reverse=True):
                longer = np.append(tokens[len(tokens) - order :], target)
                for number, segment in enumerate(self.segments):
                    for place in (segment.find(longer, limit) + order).tolist():
                        if len(result) < limit:
                            result.setdefault((TEXT, number, place), (TEXT, number, segment.source(place)))
        if found:
            for column in (found.token[0] == target).nonzero()[:limit, 0].tolist():
                number, place = int(found.segment[0, column]), int(found.place[0, column])
                result[NEIGHBOURS, number, place] = NEIGHBOURS, number, self.segments[number].source(place)
        return [*result.values()]

    def runs(self, tokens: np.ndarray, first: int) -> list[tuple[int, Run]]:
        """Return the runs of a text that are stored word for word, each with the number of its first token.

        They are found from token ``first`` on, each as long as it can be, and have at least 8 tokens.
        """
        found, at = list[tuple[int, Run]](), first
        while at + SHORTEST <= len(tokens):
            lengths = [longest_run(segment, tokens[at:]) for segment in self.segments]
            length = max(lengths)
            if length:
                segment = self.segments[lengths.index(length)]
                found.append((at, Run(length, segment.source(int(segment.find(tokens[at : at + length], 1)[0])))))
            at += length or 1
        return found


def longest_run(segment: Segment, tokens: np.ndarray) -> int:
    """Return how many of the first of some tokens, at least 8, a segment has in this order; 0 where it has fewer."""
    low, high = 0, SHORTEST  # so many occur, so many may not
    while high <= len(tokens) and np.subtract(*segment.array.range_of(tokens[:high])):
        low, high = high, 2 * high
    high = min(high, len(tokens) + 1)
    while low and low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if np.subtract(*segment.array.range_of(tokens[:middle])) else (low, middle)
    return low


def document_counts(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count how often the target followed each order's context earlier in the text, and how often any token did [e n]."""
    number = len(tokens) - 1
    added = np.zeros(2 * len(DOCUMENT_ORDERS) * len(tokens), np.int64)
    size = 1 << (2 * len(added)).bit_length()
    keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
    of_target, total = np.zeros((2, len(DOCUMENT_ORDERS), number + 1), np.int64)
    counts_in_document(keys, counts, tokens, 0, tokens, DOCUMENT_ORDERS, of_target, total, added)
    return of_target[:, 1:], total[:, 1:]


def document_followers(tokens: np.ndarray) -> np.ndarray:
    """Return what followed the contexts of a text earlier in it, as ``text_followers`` does; each place counts once."""
    places = places_of_contexts(tokens, DOCUMENT_ORDERS)
    order, token = np.repeat(np.arange(len(places)), [len(each) for each in places]), tokens[np.concatenate(places)]
    return np.stack([order, token, np.ones_like(token)])
