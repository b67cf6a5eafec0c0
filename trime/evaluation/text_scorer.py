"""Score a whole text with a model, its memories and a mixture, window by window as evaluation does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec
from trime.evaluation.generation import WindowLengths, encode
from trime.evaluation.mixture_spec import MixtureSpec
from trime.evaluation.scorer import Scorer
from trime.memory.base import Memory, Window
from trime.models.network import Network
from trime.types import Float, Tensor


class TextScorer:
    """Scores texts, each with memories that have read nothing of the others; ``start`` is the input before the first token."""

    def __init__(
        self,
        network: Network,
        row: MixtureSpec | FittedMixtureSpec,
        memories: Mapping[str, Memory],
        windows: WindowLengths,
        start: int,
        scaled_interpolation: bool = True,
    ):
        self.network, self.lengths, self.start = network, windows, start
        self.scorer = Scorer([row], memories, scaled_interpolation)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> Iterator[tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]]:
        """Yield, window by window, the log-probability of each token, and the parts of its probability by memory."""
        for scored in self.scorer.score_row(self.windows(tokens)):
            yield scored.log_probability, scored.parts()

    def windows(self, tokens: list[int]) -> Iterator[Window]:
        """Yield a text as windows of ``block`` tokens to be scored, after up to ``context`` earlier ones, with their masses."""
        state = None
        for number, first in enumerate(range(0, len(tokens), self.lengths.block)):
            begin = max(0, first - self.lengths.context)
            targets = tokens[begin : first + self.lengths.block]
            inputs = [tokens[begin - 1] if begin else self.start, *targets[:-1]]
            f, contexts, state = encode(self.network, inputs, targets, begin, number, state)
            scored_from = first - begin
            yield Window(contexts, scored_from, self.network.vocabulary_mass(f[scored_from:], contexts.token[scored_from:]))
