"""Drafts of the next tokens from the stored texts, the text so far and an expected one; and how long a draft should be.

A draft goes on with what followed the longest context, or the nearest neighbours of the last one: one token after another, as
long as that pays. The chance that a token is right comes from the share of its context's places that it followed, or of the
neighbours' weight, and from how often such tokens were right before. A call
of the model with k drafted tokens takes c(k) seconds and gives 1 + p1 + p1 p2 + … tokens, where p is the chance of each; the
best length has the most tokens a second. Unlike REST (He et al. 2024) and SuffixDecoding (Oliaro et al. 2025) there is no
threshold to set.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from trime.text_memory.experts import Experts, Neighbours
from trime.text_memory.segment import Segment
from trime.token_memory.test.ngrams_cpu import followers, longest_context, longest_earlier

STORED, WRITTEN, EXPECTED, NEAR = "stored", "written", "expected", "neighbours"  # sources of a draft
TEMPERATURE = 0.04  # of the neighbours' cosines
LEAST, MOST = 2, 24  # tokens of a context
LONGEST = 32  # tokens of a draft
FAINT = 0.05  # chance of a whole draft from which on it is not made longer
PRIOR, AT_FIRST = 2.0, 0.8  # tokens that count as tried before any was, and the share of them that was right
FORGOTTEN = 0.998  # of what was counted, a call
SURE = 0.98  # the largest chance
GUESS = 0.03  # cost of a drafted token in calls, before one was measured
RECENT, FEW = 9, 3  # calls of a kind whose times are kept; fewer are not trusted


class Drafted(NamedTuple):
    """A drafted token: its source, the length of its context, the share of the places of which it followed, its chance."""

    token: int
    source: str
    context: int
    share: float
    chance: float


class Pace:
    """What calls of a model cost on this machine, and how many drafted tokens were right; learned as tokens are written."""

    def __init__(self) -> None:
        self.calls: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=RECENT))  # by the bits of a length
        self.right: dict[tuple[str, int], float] = defaultdict(float)
        self.hoped: dict[tuple[str, int], float] = defaultdict(float)  # sums of shares, of which ``right`` came true

    def took(self, drafted: int, seconds: float) -> None:
        """Note the time of a call with some drafted tokens."""
        self.calls[drafted.bit_length()].append((drafted, seconds))

    def cost(self, drafted: int) -> float:
        """Return the time of a call with some drafted tokens, in calls without any."""
        if not self.calls[0]:
            return 1 + GUESS * drafted
        plain, lengths, costs = median(seconds for _, seconds in self.calls[0]), [0.0], [1.0]
        for kind in sorted(kind for kind in self.calls if kind):
            calls = self.calls[kind]
            length = median(length for length, _ in calls)
            # A single call that another process held up would keep such drafts from ever being tried again.
            guesses = [1 + GUESS * length] * (FEW - len(calls))
            lengths.append(length)
            costs.append(max(1.0, median([*guesses, *(seconds / plain for _, seconds in calls)])))
        return float(np.interp(drafted, lengths, costs)) + GUESS * max(0, drafted - lengths[-1])

    def chance(self, source: str, context: int, share: float) -> float:
        """Return the chance that a token is right which has this share after a context of this length."""
        kind = source, context.bit_length()
        return min(SURE, share * (PRIOR * AT_FIRST + self.right[kind]) / (PRIOR + self.hoped[kind]))

    def came_true(self, draft: list[Drafted], right: list[bool]) -> None:
        """Note for each token of a draft that was tried whether it was right; what comes behind the first wrong one was not."""
        # What was wrong fades, so that a source is tried again later.
        for counts in (self.right, self.hoped):
            for kind in counts:
                counts[kind] *= FORGOTTEN
        for token, is_right in zip(draft, right, strict=False):
            kind = token.source, token.context.bit_length()
            self.hoped[kind] += token.share
            self.right[kind] += is_right


@dataclass(frozen=True, eq=False)
class Continuation:
    """What follows some places of the segments: the segment, the place and the weight of each."""

    segments: list[Segment]
    segment: np.ndarray  # [n]
    place: np.ndarray  # [n]
    weight: np.ndarray  # [n], 1 in all before any was left out

    @staticmethod
    def of(segments: list[Segment], found: Neighbours, token: int) -> Continuation:
        """Return what follows those neighbours of a context that have the token which was written there."""
        weight = (found.similarity[0] / TEMPERATURE).softmax(0).numpy()
        has = found.token[0].numpy() == token
        return Continuation(segments, found.segment[0].numpy()[has], found.place[0].numpy()[has], weight[has])

    @cached_property
    def tokens(self) -> np.ndarray:
        """The token behind each place, -1 at the end of a document."""
        tokens = np.full(len(self.place), -1)
        for number in np.unique(self.segment):
            own, offsets = np.flatnonzero(self.segment == number), self.segments[number].offsets
            place = self.place[own]
            inside = place + 1 < offsets[np.searchsorted(offsets, place, "right")]
            tokens[own[inside]] = self.segments[number].token(place[inside] + 1)
        return tokens

    def after(self, token: int) -> Continuation:
        """Return what follows a token, where that comes next."""
        has = self.tokens == token
        return Continuation(self.segments, self.segment[has], self.place[has] + 1, self.weight[has])

    def best(self, context: int) -> list[tuple[int, str, int, float]]:
        """Return the next token of the largest weight, if there is one, as ``likeliest`` compares it."""
        inside = self.tokens >= 0
        known, inverse = np.unique(self.tokens[inside], return_inverse=True)
        if not len(known):
            return []
        share = np.bincount(inverse, self.weight[inside])
        return [(int(known[share.argmax()]), NEAR, context, float(share.max()))]


class Drafts:
    """Drafts from the stored texts of some experts, from the text so far, and from ``expected`` tokens."""

    def __init__(self, experts: Experts, pace: Pace, expected: np.ndarray | None = None):
        self.segments, self.pace = experts.segments, pace
        self.expected = np.zeros(0, np.int64) if expected is None else expected
        self.near: Continuation | None = None  # of the last place
        self.place = 0  # in the expected text, of the next token
        self.written = -1  # tokens of the text when it was last asked for

    def after(self, tokens: np.ndarray, room: int) -> list[Drafted]:
        """Return the draft after a text that gives the most tokens a second, of at most ``room`` tokens; empty if none pays."""
        # What was written since then took the place of as many expected tokens, unless a context says otherwise.
        place = self.place + (len(tokens) - self.written if self.written >= 0 else 0)
        self.place = self.next_expected(tokens, place)[1]
        place, self.written, length = self.place, len(tokens), len(tokens)
        text, draft, near = np.append(tokens, np.zeros(LONGEST, np.int64)), list[Drafted](), self.near
        all_right, gained, best, kept = 1.0, 1.0, 1.0, 0
        while len(draft) < min(room, LONGEST):
            followed = near.best(1 + len(draft)) if near else []
            found, place = self.likeliest(text[: length + len(draft)], place, followed)
            if found is None or all_right * found.chance < FAINT:
                break
            text[length + len(draft)], near = found.token, near and near.after(found.token)
            draft.append(found)
            all_right *= found.chance
            gained += all_right
            if (rate := gained / self.pace.cost(len(draft))) > best:
                best, kept = rate, len(draft)
        return draft[:kept]

    def likeliest(self, text: np.ndarray, place: int, found: list[tuple[int, str, int, float]]) -> tuple[Drafted | None, int]:
        """Return the token with the best chance to follow a text, and the place behind it in the expected text.

        ``found``: what neighbours propose: token, source, length of its context, share.
        """
        found = [*found]
        for segment in self.segments:
            array = segment.array
            context, low, high = longest_context(array.text, array.suffixes, array.starts, text, LEAST, MOST)
            if context:
                token, count = followers(array.text, array.suffixes, array.starts, low, high, context)
                best = int(count.argmax())
                found.append((int(token[best]), STORED, context, float(count[best] / count.sum())))
        context, number, share = longest_earlier(text, text, LEAST, MOST, len(text))
        if context:
            found.append((int(text[number]), WRITTEN, context, share))
        expected, place = self.next_expected(text, place)
        rated = [Drafted(*each, self.pace.chance(*each[1:])) for each in found + expected]
        return max(rated, key=lambda each: (each.chance, each.context), default=None), place + 1

    def next_expected(self, text: np.ndarray, place: int) -> tuple[list[tuple[int, str, int, float]], int]:
        """Return the token that the expected text has next, if any, and its place there: ``place``, or where a context says."""
        context, number, share = longest_earlier(self.expected, text, LEAST, MOST, place)
        place = number if context else place
        if place >= len(self.expected):
            return [], place
        return [(int(self.expected[place]), EXPECTED, context, share if context else 0.5)], place
