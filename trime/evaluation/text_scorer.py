"""Score a whole text with a model, its memories and a mixture, window by window as evaluation does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trime.evaluation.fitted_rows import FittedMixtureSpec
from trime.evaluation.generation import WindowLengths
from trime.evaluation.rows import MixtureSpec
from trime.evaluation.scorer import Scorer
from trime.memory.base import Memory, Window
from trime.models.network import Network
from trime.types import Contexts, Float, Tensor, TokenPosition


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
        self.network, self.row, self.lengths, self.start = network, row, windows, start
        self.scorer = Scorer([row], memories, scaled_interpolation)
        self.device = next(network.parameters()).device

    @torch.no_grad()
    def score(self, tokens: list[int]) -> Iterator[tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]]:
        """Yield, window by window, the log-probability of each token, and the parts of its probability by memory."""
        score_window = self.row.window_scorer()
        for window, (masses,) in self.scorer.masses(self.windows(tokens)):
            log_probability = score_window(window, masses)[0, 0]
            yield log_probability, score_window.parts(window, masses)

    def windows(self, tokens: list[int]) -> Iterator[Window]:
        """Yield the encoded windows of a text."""
        state = None
        for number, first in enumerate(range(0, len(tokens), self.lengths.block)):
            begin = max(0, first - self.lengths.context)
            targets = torch.tensor(tokens[begin : first + self.lengths.block], device=self.device)
            inputs = torch.tensor([[tokens[begin - 1] if begin else self.start, *targets[:-1].tolist()]], device=self.device)
            encoding, state = self.network(inputs, state, torch.tensor([first == 0], device=self.device))
            position = torch.arange(begin, begin + len(targets), device=self.device)
            positions = TokenPosition(torch.zeros_like(position), torch.full_like(position, number), position)
            scored_from = first - begin
            mass = self.network.vocabulary_mass(encoding.f[0, scored_from:], targets[scored_from:])
            yield Window(Contexts(encoding.g[0].float(), targets, positions), scored_from, mass)
