"""What an eviction policy is: scores of entries, given at insertion and renewed by attention; the best are kept.

A step of a memory: new entries are admitted at an initial score, the best of old and new stay, queries
attend to them block by block, and what they saw settles the scores. Rows ``b`` are independent; a memory
whose heads keep sets of their own folds heads into rows.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from trime.eviction.initial import Initial
from trime.eviction.reading import Reading
from trime.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor


class Summary(NamedTuple):
    """What the queries of a step have seen so far; it grows block by block."""

    value: Float[Tensor, "b m"]
    seen: Bool[Tensor, "b m"]  # entries that count as attended
    last: Int[Tensor, " b"]  # largest position of a query, -1 before there is one


class EvictionPolicy:
    """Keeps the highest scores. ``newest_first``: of equal scores the newer entry stays, else the older."""

    by_attention: ClassVar[bool] = True  # false: scores of attention change nothing
    is_window: ClassVar[bool] = False  # what it keeps are the last entries, without gaps

    def __init__(self, initial: Initial, newest_first: bool = True):
        self.initial, self.newest_first = initial, newest_first

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Scores of entries about to enter, float64."""
        return self.initial(ranking, position)

    def begin(self, ranking: Ranking) -> Summary:
        """An empty step."""
        return Summary(torch.zeros_like(ranking.score), torch.zeros_like(ranking.attended), torch.full_like(ranking.clock, -1))

    def observe(self, summary: Summary, block: AttentionBlock) -> Summary:
        """Adds what a block of queries saw."""
        return self.accumulate(summary, block) if block.position.shape[1] else summary

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        """The summary with a block of at least one query; here, attention changes nothing but the clock."""
        return summary._replace(last=latest(summary, block))

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        """Scores after a step; here, what was seen has its new value."""
        return torch.where(summary.seen, summary.value, ranking.score)

    def finalize(self, ranking: Ranking, summary: Summary) -> Ranking:
        """Ends the step; one without queries changes nothing."""
        changed = (summary.last >= 0)[:, None] & (ranking.position >= 0)
        return ranking._replace(
            score=torch.where(changed, self.update_scores(ranking, summary), ranking.score),
            attended=ranking.attended | (summary.seen & changed),
            clock=torch.maximum(ranking.clock, summary.last),
        )


class ByScore(EvictionPolicy):
    """A policy over attention scores, read as ``reading`` says and pooled over heads."""

    def __init__(self, initial: Initial, reading: Reading, newest_first: bool = True):
        super().__init__(initial, newest_first)
        self.reading = reading


def latest(summary: Summary, block: AttentionBlock) -> Int[Tensor, " b"]:
    """Largest position of a query up to and with this block."""
    return torch.maximum(summary.last, block.position.amax(1))


def used(block: AttentionBlock, top_k: int | None, of_all: int | None) -> Bool[Tensor, "b h q m"]:
    """Return the entries that each query retrieved, or with ``top_k`` the best so many of them.

    A memory without a top-k of its own retrieves all that is seen, of which the ``of_all`` best count; null: all of it.
    """
    hits = block.seen if block.retrieved is None else block.retrieved & block.seen
    count = of_all if top_k is None and block.retrieved is None else top_k
    return hits if count is None else hits & largest(block.score, count)


def largest(score: Float[Tensor, "b h q m"], k: int) -> Bool[Tensor, "b h q m"]:
    """The ``k`` largest of each row, or all where there are no more."""
    index = score.topk(min(k, score.shape[-1]), dim=-1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, True)
