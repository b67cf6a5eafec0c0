"""A mixture of memories over the windows of any language model, outside the pipeline: for one's own evaluation loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec, MassCollector
from trime.evaluation.scorer import Scorer
from trime.memory.base import Memory, Window
from trime.mixtures.adaptive import Adaptive
from trime.mixtures.experts import Mixture
from trime.mixtures.folds import folds
from trime.types import Contexts, Float, Int, Mass, Tensor, TokenPosition

TEMPERATURES = [0.25, 0.5, 1.0, 2.0]  # of the experts of each memory, times sqrt(d)


def window_of(
    g: Float[Tensor, "n d"],
    logits: Float[Tensor, "m v"],
    targets: Int[Tensor, " n"],
    document: int = 0,
    start: int = 0,
) -> Window:
    """Return a window of a text for memories and mixtures.

    g are its contexts, of which the last m are scored by their ``logits`` and the ones before were scored already;
    ``targets`` are the tokens that followed, and ``start`` the position of the first of them in the ``document``.
    """
    size, scored = len(targets), len(logits)
    number = torch.full((size,), document, device=g.device)
    positions = TokenPosition(number, number, start + torch.arange(size, device=g.device))
    scores = logits.float()
    mass = Mass(scores.gather(1, targets[size - scored :, None]).squeeze(1), scores.logsumexp(1))
    return Window(Contexts(g.float(), targets, positions), size - scored, mass)


class MemoryMixture:
    """The vocabulary of a model and some memories, mixed with weights that are fitted to windows of held-out text.

    ``memories`` by name, each with one size. ``mixture``: by default ``Adaptive``. Windows come in the order of the text.
    Raises ValueError where there are fewer than three ``folds``: ``Adaptive`` scores one, stops at one, and fits to the rest.
    """

    def __init__(self, memories: dict[str, Memory], mixture: Mixture | None = None, folds: int = 8, seed: int = 0):
        if folds < 3:
            raise ValueError(f"folds={folds}: a mixture is fitted to some folds and judged by others, which takes 3 or more")
        self.memories, self.mixture = memories, mixture or Adaptive(TEMPERATURES)
        self.folds, self.seed = folds, seed
        sizes = next((memory.sizes for memory in memories.values() if memory.sizes != Memory.sizes), [0])
        self.row = FittedMixtureSpec(type(self.mixture).__name__.lower(), (*memories,), self.mixture.temperatures, (*sizes,))

    def scorer(self) -> Scorer:
        """Return a scorer of the mixture; its memories forget what they read."""
        return Scorer([self.row], self.memories, scaled_interpolation=True)

    def fit(self, windows: Iterable[Window]) -> float:
        """Fit the weights; return the mean loss in nats of tokens under a fit without their documents (cross-fitted)."""
        collector = MassCollector(self.row)
        for window, (masses,) in self.scorer().masses(iter(windows)):
            collector.add(window, masses)
        self.mixture.memories, masses_of_text = collector.experts, collector.masses()
        fold = folds(masses_of_text.document, self.folds, self.seed)
        loss = -self.mixture.fit(masses_of_text, fold, collector.counts(self.memories), self.seed).mean()
        self.row = replace(self.row, fitted=self.mixture, online=self.mixture.learns)
        return float(loss)

    def score(self, windows: Iterable[Window]) -> Iterator[Float[Tensor, " n"]]:
        """Yield the log-probability in nats of each scored token, window by window."""
        return (scored.log_probability for scored in self.scorer().scored(iter(windows)))

    def explain(self, windows: Iterable[Window]) -> Iterator[tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]]:
        """Yield log-probabilities, and how much of each probability comes from the vocabulary and from each memory."""
        return ((scored.log_probability, scored.parts()) for scored in self.scorer().scored(iter(windows)))
