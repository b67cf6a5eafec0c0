"""A mixture of memories over the windows of any language model, outside the pipeline: for one's own evaluation loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trime.common.checks import (
    check_device,
    check_floats,
    check_in_vocabulary,
    check_number,
    check_object,
    check_whole_numbers,
    short_repr,
)
from trime.common.types import Contexts, Float, Int, LogMass, Tensor, TokenPosition
from trime.errors import UserError
from trime.scoring.mixture_spec import FittedMixtureSpec, MassCollector
from trime.scoring.mixtures.adaptive import Adaptive
from trime.scoring.mixtures.experts import FEWEST_FOLDS, Mixture, folds
from trime.scoring.scorer import Scorer
from trime.token_memory.test.base import Memory, Window

VOCABULARY = "vocabulary"  # the name of the model's own contribution
TEMPERATURES = [0.25, 0.5, 1.0, 2.0]  # of the experts of each memory, times sqrt(d)


def window_of(
    g: Float[Tensor, "n d"], logits: Float[Tensor, "m v"], targets: Int[Tensor, " n"], document: int = 0, start: int = 0
) -> Window:
    """Return a window of a text for memories and mixtures.

    g are its contexts: the last m are scored by their ``logits``, and the ones before were scored already;
    ``targets`` are the tokens that followed, and ``start`` the position of the first of them in the ``document``: number texts
    by it, and begin each window where the one before ended. Raises UserError where lengths disagree, targets are outside of the
    vocabulary, or values are not finite.
    """
    check_floats("g", g, 2)
    check_floats("logits", logits, 2)
    check_whole_numbers("targets", targets, 1)
    check_device(g=g, logits=logits, targets=targets)
    targets, size, scored = targets.long(), len(targets), len(logits)
    if not 1 <= scored <= size == len(g):
        raise UserError(
            f"{len(g)} rows of g, {size} targets, {scored} rows of logits: there must be a target for each row "
            "of g, and logits for the last of them"
        )
    check_in_vocabulary("targets", targets, logits.shape[1])
    check_number("document", document, at_least=-(2**63), at_most=2**63 - 1, whole=True)
    check_number("start", start, at_least=0, at_most=2**62, whole=True)
    if not g.float().square().sum(1).isfinite().all():
        raise UserError("g holds NaN, infinity, or numbers whose squares overflow: see what computed it")
    if logits.isnan().any() or (logits == torch.inf).any() or (logits == -torch.inf).all(1).any():
        raise UserError("logits hold NaN or infinity, or a row of -inf alone: see what computed them")
    number = torch.full((size,), document, device=g.device)
    positions = TokenPosition(number, number, start + torch.arange(size, device=g.device))
    scores = logits.float()
    mass = LogMass(scores.gather(1, targets[size - scored :, None]).squeeze(1), scores.logsumexp(1))
    return Window(Contexts(g.float(), targets, positions), size - scored, mass)


class MemoryMixture:
    """The vocabulary of a model and some memories, mixed with weights that are fitted to windows of held-out text.

    ``memories`` by name, each with one size. ``mixture``: by default ``Adaptive``. Windows come in the order of the text.
    Memories and mixture are copied, so that other uses of them, such as another pass over a text, change nothing here.
    Raises UserError where there are fewer than three ``folds``: ``Adaptive`` scores one, stops at one, and fits to the rest.
    """

    def __init__(self, memories: dict[str, Memory], mixture: Mixture | None = None, folds: int = 8, seed: int = 0):
        check_memories(memories)
        if mixture is not None:
            check_object("mixture", mixture, Mixture, "Adaptive([0.5, 1.0])")
        check_number("seed", seed, whole=True)
        check_number("folds", folds, at_least=FEWEST_FOLDS, whole=True)
        self.memories, self.mixture = memories, mixture or Adaptive(TEMPERATURES)
        self.folds, self.seed = folds, seed
        sizes = next((memory.sizes for memory in memories.values() if memory.sizes != Memory.sizes), [0])
        self.row = FittedMixtureSpec(type(self.mixture).__name__.lower(), (*memories,), self.mixture.temperatures, (*sizes,))

    def checked_windows(self, windows: Any) -> Iterator[Window]:
        """Return an iterator that checks each window; where a memory keeps what it has read, no text may come twice."""
        return check_windows(windows, any(memory.state_scope for memory in self.memories.values()))

    def scorer(self) -> Scorer:
        """Return a scorer of the mixture with memories of its own, which have read nothing."""
        memories = {name: copy.deepcopy(memory) for name, memory in self.memories.items()}
        return Scorer([self.row], memories, scaled_interpolation=True)

    def fitted_scorer(self) -> Scorer:
        """Return a scorer of the fitted mixture; UserError before ``fit``."""
        if self.row.fitted is None:
            raise UserError("the mixture has not been fitted yet: call fit(windows) with windows of held-out text first")
        return self.scorer()

    def fit(self, windows: Iterable[Window]) -> float:
        """Fit the weights; return the mean loss in nats of tokens under a fit without their documents (cross-fitted)."""
        collector = MassCollector(self.row)
        for window, (masses,) in self.scorer().query(self.checked_windows(windows)):
            collector.add(window, masses)
        if not collector.tokens:
            raise UserError("there are no windows to fit the mixture to")
        masses_of_text, mixture = collector.masses(), copy.deepcopy(self.mixture)
        mixture.memories = collector.experts
        fold = folds(masses_of_text.document, self.folds, self.seed)
        loss = -float(mixture.fit(masses_of_text, fold, collector.counts(self.memories), self.seed).mean())
        if not math.isfinite(loss):
            raise UserError(f"the fit of the mixture has a loss of {loss}: look for values in the windows that are not finite")
        self.mixture, self.row = mixture, replace(self.row, fitted=mixture)
        return loss

    def score(self, windows: Iterable[Window]) -> Iterator[Float[Tensor, " n"]]:
        """Yield the log-probability in nats of each scored token, window by window."""
        return (scored.log_probability for scored in self.fitted_scorer().score_row(self.checked_windows(windows)))

    def explain(self, windows: Iterable[Window]) -> Iterator[tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]]:
        """Yield log-probabilities, and how much of each probability comes from the vocabulary and from each memory."""
        return (
            (scored.log_probability, scored.contributions())
            for scored in self.fitted_scorer().score_row(self.checked_windows(windows))
        )


def check_memories(memories: Any) -> None:
    """Raise UserError unless there are memories by name, each with one size."""
    if not isinstance(memories, dict) or not memories:
        raise UserError(f"memories={short_repr(memories)}: name at least one, as in {{'local': LocalMemory()}}")
    for name, memory in memories.items():
        check_object(f"memory {name}", memory, Memory, "LocalMemory()")
        if not isinstance(name, str) or name == VOCABULARY:
            raise UserError(f"memories: {short_repr(name)} cannot be the name of a memory: take another name")
        if len(memory.sizes) != 1:
            raise UserError(f"memory {name} has sizes {memory.sizes}: a mixture takes memories of one size each")


def check_windows(windows: Any, ordered: bool) -> Iterator[Window]:
    """Return an iterator over windows that checks each; UserError now, not at the first window, for anything else."""
    if isinstance(windows, Window) or not isinstance(windows, Iterable):
        raise UserError(f"windows is of type {type(windows).__name__}: pass a list of windows, as window_of returns them")
    return check_each(windows, ordered)


def check_each(windows: Iterable[Window], ordered: bool) -> Iterator[Window]:
    """Yield windows; UserError at what is none, has keys of another width than the first, or is not ``ordered``."""
    width, read = None, dict[int, int]()  # the last scored position of each document
    for window in windows:
        check_object("a window", window, Window, "window_of(g, logits, targets)")
        of_window = window.contexts.g.shape[1]
        width = width or of_window
        if of_window != width:
            raise UserError(f"a window has contexts of width {of_window}, and the first window of width {width}")
        for document, position in first_and_last(window.scored.positions) if ordered else ():
            if position[0] <= read.get(document, -1):
                raise UserError(
                    f"document {document} goes back from position {read[document]} to {position[0]}, so that its text would "
                    "find itself: pass windows in the order of the text, each with its document= and start="
                )
            read[document] = position[1]
        yield window


def first_and_last(positions: TokenPosition) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the documents of some contexts, each with the first and the last of its positions."""
    for document in positions.document.unique().tolist():
        own = positions.position[positions.document == document]
        yield document, (int(own.min()), int(own.max()))
