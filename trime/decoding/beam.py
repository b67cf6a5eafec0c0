"""Batched beam search as in fairseq's generator (Ott et al. 2019).

A finished hypothesis scores its log-probability divided by its length to the power of a penalty; both include the end
symbol. Of a step's 2k best continuations, those among the first k that end are finished, and the first k others are
continued, until k are finished or the sentence has its maximum length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from trime.common.types import Bool, Float, Int, Tensor

StepFunction = Callable[[Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n v"]]


class Hypothesis(NamedTuple):
    """A translation without its end symbol, and its score."""

    tokens: list[int]
    score: float


class Beam(NamedTuple):
    """A beam of ``size`` hypotheses a sentence; ``length_penalty`` 1 scores by the mean log-probability, 0 by the sum."""

    size: int
    length_penalty: float
    min_length: int = 0  # of a hypothesis, in tokens (fairseq's --min-len)

    def search(self, step: StepFunction, start: int, end: int, longest: list[int], device: torch.device) -> list[Hypothesis]:
        """Return the best finished hypothesis of each sentence, of ``min_length`` to ``longest`` tokens.

        ``step`` returns the log-probabilities of each row's next token; its arguments are the rows of the previous call
        that are continued, and the tokens chosen for them. The first call has rows 0 to n - 1, ``size`` for each sentence.
        """
        k, sentences = self.size, list(range(len(longest)))
        rows = torch.arange(len(sentences) * k, device=device)
        tokens = torch.full((len(rows), 1), start, dtype=torch.long, device=device)
        score = torch.full((len(sentences), k), -torch.inf, dtype=torch.float64, device=device)
        score[:, 0] = 0  # at first all hypotheses of a sentence are the same
        finished: list[list[Hypothesis]] = [[] for _ in longest]
        for length in range(1, max(longest) + 2):
            must_end = torch.tensor([length > longest[sentence] for sentence in sentences], device=device)
            top, following = self.continuations(step(rows, tokens[:, -1]), length, must_end.repeat_interleave(k), end)
            total = (score[..., None] + top.view(len(sentences), k, -1)).flatten(1)
            best, cell = total.topk(2 * k, dim=1)
            parent, token = cell // top.shape[1], following.view(len(sentences), -1).gather(1, cell)
            active: list[int] = []
            continued: list[list[int]] = []
            for place, sentence in enumerate(sentences):
                ends = (token[place] == end).tolist()
                for candidate in range(k):
                    if ends[candidate] and best[place, candidate] > -torch.inf:
                        row = place * k + int(parent[place, candidate])
                        normalized = float(best[place, candidate]) / length**self.length_penalty
                        finished[sentence].append(Hypothesis(tokens[row, 1:].tolist(), normalized))
                if len(finished[sentence]) < k and length <= longest[sentence]:
                    active.append(place)
                    continued.append([candidate for candidate in range(2 * k) if not ends[candidate]][:k])
            if not active:
                break
            chosen = torch.tensor(continued, device=device)
            places = torch.tensor(active, device=device)[:, None]
            rows = (places * k + parent[places, chosen]).flatten()
            tokens = torch.cat([tokens[rows], token[places, chosen].flatten()[:, None]], 1)
            score, sentences = best[places, chosen], [sentences[place] for place in active]
        return [max(hypotheses, key=lambda hypothesis: hypothesis.score) for hypotheses in finished]

    def continuations(
        self, log_probs: Float[Tensor, "n v"], length: int, must_end: Bool[Tensor, " n"], end: int
    ) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
        """Return the log-probabilities and tokens of the best continuations of each row; rows that must end have one."""
        if length <= self.min_length:
            log_probs = log_probs.index_fill(1, torch.tensor([end], device=log_probs.device), -torch.inf)
        top, following = log_probs.topk(min(2 * self.size, log_probs.shape[1]), dim=1)  # a sentence never needs more of one row
        if not must_end.any():
            return top, following
        end_only, ending = torch.full_like(top, -torch.inf), must_end[:, None]
        end_only[:, 0] = log_probs[:, end]
        return torch.where(ending, end_only, top), following.masked_fill(ending, end)
