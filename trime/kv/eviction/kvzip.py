"""KVzip (Kim et al. 2025): entries stay to which the model attends while it repeats the text that they belong to."""

from __future__ import annotations

import copy
from typing import Any

import torch

from trime.common.types import AttentionBlock, Float, Int, Ranking, Tensor
from trime.kv.eviction.base import EvictionPolicy, Summary
from trime.kv.eviction.initial import OwnPosition
from trime.kv.eviction.lra_max import LRAMax
from trime.kv.eviction.score_transform import ScoreTransform, Softmax

FIRST, NEXT = "\n\nRepeat the previous text:\n", "\n\nRepeat the part of the previous text that starts with:"
BEFORE = 8  # tokens before a part that tell the model where to begin


class KVzip(LRAMax):
    """Score entries by the most that a query of any question gave them; of a text itself no query counts.

    ``cache.read(model, text, repeats(tokenizer, text), whole=True)`` asks the model to repeat the text. Entries that no
    question has seen, as those of what is written, stay until one has.
    """

    uses_attention = False

    def __init__(self, score_transform: ScoreTransform | None = None, newest_first: bool = True, sinks: int = 4):
        super().__init__(OwnPosition(), Softmax() if score_transform is None else score_transform, newest_first, sinks)

    def for_questions(self) -> EvictionPolicy:
        """Return the policy for a step of queries that score entries."""
        policy = copy.copy(self)
        policy.uses_attention = True
        return policy

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        return super().accumulate(summary, block) if self.uses_attention else EvictionPolicy.accumulate(self, summary, block)

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        """Return for each entry [b m] the most that a query of any question has given it; others keep the scores they have."""
        before = ranking.score.masked_fill(~ranking.attended, -torch.inf)
        return torch.where(summary.attended, torch.maximum(summary.value, before), ranking.score)


def repeats(tokenizer: Any, text: Int[Tensor, "b l"], part: int = 1024) -> list[Int[Tensor, "b _"]]:
    """Return prompts that ask for texts, in parts of this number of tokens, each followed by the part itself."""
    result = []
    for first in range(0, text.shape[1], part):
        asked = tokenizer(NEXT if first else FIRST, add_special_tokens=False, return_tensors="pt")["input_ids"].to(text.device)
        result.append(
            torch.cat([asked.expand(len(text), -1), text[:, max(0, first - BEFORE) : first], text[:, first : first + part]], 1)
        )
    return result
