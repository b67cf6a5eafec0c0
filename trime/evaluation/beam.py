"""Beam search over sentences side by side, as fairseq's generator searches (Ott et al. 2019).

A finished hypothesis scores its log-probability over its length to the power of a penalty; the end counts in both. Of a
step's 2k best continuations, those among the first k that end are finished, and the first k others go on, until k are
finished or the sentence is as long as it may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from trime.types import Float, Int, Tensor

Step = Callable[[Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n v"]]


class Hypothesis(NamedTuple):
    """A translation without its end, and its score."""

    tokens: list[int]
    score: float


class Beam(NamedTuple):
    """``size`` hypotheses of a sentence go on; ``penalty``: of length (1: the mean log-probability; 0: the sum).

    ``shortest`` is how many tokens a hypothesis has at least (fairseq's --min-len).
    """

    size: int
    penalty: float
    shortest: int = 0

    def search(self, step: Step, start: int, end: int, longest: list[int], device: torch.device) -> list[Hypothesis]:
        """The best finished hypothesis of each sentence, which has at most ``longest`` tokens (and not less than ``shortest``).

        ``step`` gives the log-probabilities of the next tokens of rows: which rows of the last call they go on
        from, and the tokens that were chosen for them. At first all rows are 0 to n - 1, ``size`` for each sentence.
        """
        k, sentences = self.size, list(range(len(longest)))
        rows = torch.arange(len(sentences) * k, device=device)
        tokens = torch.full((len(rows), 1), start, dtype=torch.long, device=device)
        score = torch.full((len(sentences), k), -torch.inf, dtype=torch.float64, device=device)
        score[:, 0] = 0  # at first all are the same one
        finished: list[list[Hypothesis]] = [[] for _ in longest]
        for length in range(1, max(longest) + 2):
            found = step(rows, tokens[:, -1])
            if length <= self.shortest:
                found = found.index_fill(1, torch.tensor([end], device=device), -torch.inf)
            most, following = found.topk(min(2 * k, found.shape[1]), dim=1)  # more of one row are never among a sentence's
            ending = torch.tensor([length > longest[sentence] for sentence in sentences], device=device)
            if ending.any():  # nothing but the end may follow
                only = torch.full_like(most, -torch.inf)
                only[:, 0] = found[:, end]
                over = ending.repeat_interleave(k)[:, None]
                most, following = torch.where(over, only, most), following.masked_fill(over, end)
            total = (score[..., None] + most.view(len(sentences), k, -1)).flatten(1)
            best, cell = total.topk(2 * k, dim=1)
            parent, token = cell // most.shape[1], following.view(len(sentences), -1).gather(1, cell)
            going: list[int] = []
            kept: list[list[int]] = []
            for place, sentence in enumerate(sentences):
                ends = (token[place] == end).tolist()
                for candidate in range(k):
                    if ends[candidate] and best[place, candidate] > -torch.inf:
                        row = place * k + int(parent[place, candidate])
                        mean = float(best[place, candidate]) / length**self.penalty
                        finished[sentence].append(Hypothesis(tokens[row, 1:].tolist(), mean))
                if len(finished[sentence]) < k and length <= longest[sentence]:
                    going.append(place)
                    kept.append([candidate for candidate in range(2 * k) if not ends[candidate]][:k])
            if not going:
                break
            chosen = torch.tensor(kept, device=device)
            which = torch.tensor(going, device=device)[:, None]
            rows = (which * k + parent[which, chosen]).flatten()
            tokens = torch.cat([tokens[rows], token[which, chosen].flatten()[:, None]], 1)
            score, sentences = best[which, chosen], [sentences[one] for one in going]
        return [max(own, key=lambda hypothesis: hypothesis.score) for own in finished]
