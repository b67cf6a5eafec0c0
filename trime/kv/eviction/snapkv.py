"""SnapKV (Li et al. 2024): the attention weights of the last queries, smoothed over neighbouring entries."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F

from trime.common.checks import check_number
from trime.common.types import AttentionBlock, Float, Int, Ranking, Tensor
from trime.errors import UserError
from trime.kv.eviction.base import AttentionScorePolicy, Summary, check_recent, last_position, newest_slots
from trime.kv.eviction.initial import OwnPosition
from trime.kv.eviction.score_transform import ScoreTransform, Softmax, summed_over_heads


class SnapKV(AttentionScorePolicy):
    """Score entries by the mean of what the last ``window`` queries of a step gave them, averaged over ``kernel`` neighbours.

    The ``window`` newest entries always stay, count as neighbours of none, and are scored by the first step after which they
    are no longer among them: until then they come before all others, as new entries do. ``score_transform`` is by default the
    attention weight, as in the paper. UserError unless ``window`` is at least 1, and ``kernel`` at least 1 and odd.
    """

    scored_by = "last_step"
    free_slots = 2  # an entry that has just left the window has no score yet, and takes the first

    def __init__(
        self,
        score_transform: ScoreTransform | None = None,
        window: int = 64,
        kernel: int = 5,
        newest_first: bool = True,
        sinks: int = 0,
    ):
        super().__init__(OwnPosition(), Softmax() if score_transform is None else score_transform, newest_first, sinks)
        check_number("eviction.kernel", kernel, at_least=1, whole=True)
        if kernel % 2 == 0:
            raise UserError(f"eviction.kernel={kernel} must be odd: an entry has as many neighbours before it as after it")
        self.window, self.kernel = check_recent(window, "window"), kernel
        self.observes, self.is_for_questions = self.window, False

    def protected(self, size: int) -> int:
        return self.window

    def for_questions(self) -> SnapKV:
        """Return the policy for which only the entries of the queries that decide count as neighbours of none."""
        policy = copy.copy(self)
        policy.is_for_questions = True
        return policy

    def begin(self, ranking: Ranking) -> Summary:
        b, m = ranking.score.shape
        return super().begin(ranking)._replace(value=ranking.score.new_zeros(b, 0, m))

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        """Return the summary with the values of the last queries, those of the block included, summed over heads."""
        if block.position.shape[1] > self.window:
            block = block.take(block.position.topk(self.window, dim=1).indices)
        value = summed_over_heads(self.score_transform, block)
        position = torch.cat([summary.window, block.position], 1)
        value, last = torch.cat([summary.value, value], 1), last_position(summary, block)
        if position.shape[1] > self.window:
            newest = position.topk(self.window, dim=1).indices
            rows = torch.arange(len(position), device=position.device)[:, None]
            value, position = value[rows, newest], position[rows, newest]
        return summary._replace(value=value, last=last, window=position)

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        queries = (summary.window >= 0).sum(1, keepdim=True).clamp(min=1)
        count = queries if self.is_for_questions else torch.full_like(queries, self.window)
        score = smoothed(summary.value.sum(1) / queries, ranking.position, count, self.kernel)
        if self.is_for_questions:
            return score
        # The newest entries keep the scores that they entered with (their positions) until they leave the window.
        newest = newest_slots(ranking.position, self.window)
        return score.scatter(1, newest, ranking.score.gather(1, newest))


def smoothed(
    score: Float[Tensor, "b m"], position: Int[Tensor, "b m"], newest: Int[Tensor, "b 1"], kernel: int
) -> Float[Tensor, "b m"]:
    """Return the mean score of ``kernel`` neighbours by position; ``newest`` entries, and none before the first, are zeros."""
    if not score.shape[1]:
        return score
    order = position.argsort(1)  # empty slots come first
    sorted_score = score.gather(1, order).masked_fill(position.gather(1, order) < 0, 0.0)
    sorted_score.masked_fill_(torch.arange(score.shape[1], device=score.device) >= score.shape[1] - newest, 0.0)
    pooled = F.avg_pool1d(sorted_score[:, None], kernel, 1, kernel // 2)[:, 0]
    return torch.empty_like(score).scatter(1, order, pooled)
