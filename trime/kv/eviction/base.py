"""The interface of eviction policies: entries are scored at insertion, attention updates the scores, the best are kept.

In one step of a memory, new entries are admitted at an initial score, the best of old and new entries are kept,
queries attend to them block by block, and the accumulated attention then updates the scores. Rows ``b`` are
independent; a memory whose heads keep separate entries folds the heads into rows.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from trime.common.checks import check_number, check_object
from trime.common.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor
from trime.errors import UserError
from trime.kv.eviction.initial import BelowMean, Initial
from trime.kv.eviction.score_transform import Raw, ScoreTransform


class Summary(NamedTuple):
    """The attention that the queries of a step have paid to each entry so far, accumulated block by block."""

    value: Float[Tensor, "b *w m"]  # of all queries together, or of the last w ones by themselves
    attended: Bool[Tensor, "b m"]  # entries that count as attended
    last: Int[Tensor, " b"]  # largest position of a query, -1 before there is one
    window: Int[Tensor, "b w"]  # positions of the last w queries where their values are kept apart, -1: none; else w = 0


class EvictionPolicy:
    """Base class of policies, which keep the entries of the highest scores.

    ``newest_first``: of entries with equal scores the newest is kept, otherwise the oldest. ``sinks``: the number of entries,
    the first of a row, that always stay and count towards the memory's size (StreamingLLM, Xiao et al. 2024).
    """

    uses_attention: bool = True  # False: the memory does not report attention to the policy
    needs_keys: ClassVar[bool] = False  # True: scores depend on the stored keys
    keeps_newest: bool = False  # True: always keeps the last entries, without gaps
    can_be_guided: bool = False  # True: scores are of attention whenever it was paid, so that a question can decide them
    # What the scores depend on as long as nothing is evicted: every step, as it came (steps); all queries, in whatever steps
    # (queries); or the last step alone (last_step). A memory that is not full need not score step by step then.
    scored_by: str = "steps"
    observes: int | None = None  # queries of a step, the newest, on which scores depend; None: all of them
    free_slots: int = 1  # that it needs beside sinks and protected entries to choose between others

    def __init__(self, initial: Initial, newest_first: bool = True, sinks: int = 0):
        check_object("eviction.initial", initial, Initial, "BelowMean()")
        check_number("eviction.sinks", sinks, at_least=0, whole=True)
        self.initial, self.newest_first, self.sinks = initial, newest_first, sinks

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the initial scores of new entries, in float64; position -1 is no entry."""
        return self.initial(ranking, position)

    def admit_entries(
        self, columns: tuple[Tensor, ...], ranking: Ranking, position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b n"]:
        """Return the initial scores of new entries, whose stored ``columns`` are [b n ...], the key first."""
        return self.admit(ranking, position)

    def enter(self, columns: tuple[Tensor, ...], ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the scores with which new entries enter: those of ``admit_entries``, and infinity for sinks."""
        score = self.admit_entries(columns, ranking, position)
        if not self.sinks:
            return score
        # Entries that were ever written are counted, not those in memory: a sink is among the first of a document.
        valid = position >= 0
        count = ranking.written[:, None] + valid.cumsum(1) - 1
        return score.masked_fill(valid & (count < self.sinks), torch.inf)

    def compete(self, position: Int[Tensor, "b c"], score: Float[Tensor, "b c"], size: int) -> Float[Tensor, "b c"]:
        """Return the scores by which old and new entries compete for the ``size`` slots; the newest may be protected."""
        if not (newest := min(self.protected(size), max(0, size - self.sinks))):
            return score
        return score.scatter(1, newest_slots(position, newest), torch.inf).masked_fill(position < 0, -torch.inf)

    def protected(self, size: int) -> int:
        """Return the number of newest entries that always stay in a memory of ``size`` slots; here none."""
        return 0

    def check_size(self, size: int) -> None:
        """Raise UserError where a memory of ``size`` entries leaves no choice: all are sinks, or the newest ones."""
        if size and size <= self.sinks:
            raise UserError(f"memory_size={size} has no room beside eviction.sinks={self.sinks}: raise it, or lower the sinks")
        newest = self.protected(size)
        if size and newest and size < self.sinks + newest + self.free_slots:
            raise UserError(
                f"memory_size={size}: {type(self).__name__} always keeps the {newest} newest entries and needs "
                f"{self.sinks + self.free_slots} more to choose between others, or it is FIFO: raise memory_size, or lower "
                "eviction.window or eviction.recent"
            )

    def for_questions(self) -> EvictionPolicy:
        """Return the policy for a step whose queries score entries without leaving entries of their own; here itself."""
        return self

    def begin(self, ranking: Ranking) -> Summary:
        """Return the empty summary with which a step begins."""
        nothing, never = torch.zeros_like(ranking.score), torch.full_like(ranking.clock, -1)
        return Summary(nothing, torch.zeros_like(ranking.attended), never, never.new_empty(len(never), 0))

    def observe(self, summary: Summary, block: AttentionBlock) -> Summary:
        """Return the summary with a block of queries added; an empty block changes nothing."""
        return self.accumulate(summary, block) if block.position.shape[1] else summary

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        """Return the summary with a block of at least one query added; here only the last position changes."""
        return summary._replace(last=last_position(summary, block))

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        """Return the scores after a step; here attended entries take the value of the summary."""
        return torch.where(summary.attended, summary.value, ranking.score)

    def finalize(self, ranking: Ranking, summary: Summary) -> Ranking:
        """Return the ranking after a step; a step without queries changes nothing."""
        changed = (summary.last >= 0)[:, None] & (ranking.position >= 0)
        # Sinks have the score infinity, which no attention may replace.
        if self.sinks:
            changed &= ranking.score != torch.inf
        return ranking._replace(
            score=torch.where(changed, self.update_scores(ranking, summary), ranking.score),
            attended=ranking.attended | (summary.attended & changed),
            clock=torch.maximum(ranking.clock, summary.last),
        )


class AttentionScorePolicy(EvictionPolicy):
    """A policy over attention scores, which ``score_transform`` transforms before they are pooled over heads.

    By default, as in Attendre, new entries start at the mean score of the stored ones, and scores are taken before the softmax.
    """

    can_be_guided = True

    def __init__(
        self,
        initial: Initial | None = None,
        score_transform: ScoreTransform | None = None,
        newest_first: bool = True,
        sinks: int = 0,
    ):
        super().__init__(BelowMean() if initial is None else initial, newest_first, sinks)
        self.score_transform = Raw() if score_transform is None else score_transform
        check_object("eviction.score_transform", self.score_transform, ScoreTransform, "Raw()")


def check_recent(recent: int, name: str = "recent") -> int:
    """Return a number of newest entries that always stay; UserError unless it is at least 1, for a query sees its own entry."""
    check_number(f"eviction.{name}", recent, at_least=1, whole=True)
    return recent


def check_top_k(top_k: int | None, fallback_top_k: int | None) -> None:
    """Raise UserError unless each is null or a number of retrieved entries."""
    for name, count in (("top_k", top_k), ("fallback_top_k", fallback_top_k)):
        if count is not None:
            check_number(f"eviction.{name}", count, at_least=1, whole=True)


def newest_slots(position: Int[Tensor, "b c"], count: int) -> Int[Tensor, "b n"]:
    """Return the slots of the ``count`` newest entries of each row, of all where there are fewer."""
    return position.topk(min(count, position.shape[1]), dim=1).indices


def last_position(summary: Summary, block: AttentionBlock) -> Int[Tensor, " b"]:
    """Return the largest position of a query, this block included."""
    return torch.maximum(summary.last, block.position.amax(1))


def sum_seen(
    block: AttentionBlock, importance: Float[Tensor, "b h q m"], weight: Float[Tensor, "b q"]
) -> tuple[Float[Tensor, "b m"], Bool[Tensor, "b m"]]:
    """Return sum_q weight_q sum_h importance in float64, over what each query sees, and the entries that any query sees."""
    visible = block.visible
    by_query = importance.masked_fill(~visible, 0.0).sum(1, dtype=torch.float64)
    return (weight[:, None] @ by_query).squeeze(1), visible.any(2).any(1)


def retrieved_entries(block: AttentionBlock, top_k: int | None, fallback_top_k: int | None) -> Bool[Tensor, "b h q m"]:
    """Return the mask of entries that each query retrieved; ``top_k`` limits it to the best of them."""
    hits = block.visible if block.retrieved is None else block.retrieved & block.visible
    # A memory without a top-k of its own retrieves all that it sees: not all of that counts as used.
    count = fallback_top_k if top_k is None and block.retrieved is None else top_k
    return hits if count is None else hits & topk_mask(block.score, count)


def topk_mask(score: Float[Tensor, "b h q m"], k: int) -> Bool[Tensor, "b h q m"]:
    """Return the mask of the ``k`` largest scores along the last axis, or of all where there are fewer."""
    index = score.topk(min(k, score.shape[-1]), dim=-1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, True)
