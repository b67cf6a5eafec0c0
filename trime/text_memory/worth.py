"""Evaluation of memories on a text: perplexity with and without them, with intervals over parts of documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trime.common.types import Float, Int, Tensor
from trime.report.bootstrap import Difference, paired_bootstrap
from trime.report.run_result import FEWEST
from trime.scoring.mixtures.experts import ExpertMasses

PART = 1024  # tokens of a document that the bootstrap draws together, at most
NAMED = 5


class Scored(NamedTuple):
    """The experts' masses for the tokens of a text, and how sure the model was of each; of a whole text also its size."""

    masses: ExpertMasses
    features: Float[Tensor, "n f"]
    bytes: int = 0  # of the text, that these tokens predict


def resampled_parts(document: Int[Tensor, " n"], size: int) -> np.ndarray:
    """Return for each token the number of what a bootstrap draws together: up to ``size`` tokens of a document."""
    numbers = document.numpy()
    part = np.zeros(len(numbers), np.int64)
    for number in np.unique(numbers):
        inside = np.flatnonzero(numbers == number)
        part[inside] = part.max() + 1 + np.arange(len(inside)) // size
    return part - part.min()


@dataclass(frozen=True)
class MemoryEvaluation:
    """Perplexities a token: of the model alone, with all memories, and with all but one; printing it gives a table.

    ``differences``: with all memories less than the model alone (``model``), and less than without each memory.
    """

    tokens: int
    documents: int
    bytes: int
    perplexity: dict[str, float]
    differences: dict[str, Difference]
    bits_per_byte: dict[str, float]
    near_copies: list[str]

    @staticmethod
    def of(
        documents: int, predicted: int, masses: ExpertMasses, loss: dict[str, Tensor], near_copies: list[str]
    ) -> MemoryEvaluation:
        """Return the worth, given each token's loss in nats under ``all`` memories and under all but one, by its name.

        ``predicted``: the bytes of those tokens, without what is not predicted of each text.
        """
        losses = {"model": -masses.log_probability[:, 0], **loss}
        part = resampled_parts(masses.document, PART)
        sums = {
            name: np.stack([np.bincount(part, each.double().numpy()), np.bincount(part)], 1) for name, each in losses.items()
        }
        mean = {name: float(each.double().mean()) for name, each in losses.items()}
        bits = {name: value * len(part) / math.log(2) / predicted for name, value in mean.items()}
        differences = {
            name: paired_bootstrap(np.stack([sums["all"], each])[None], "perplexity")
            for name, each in sums.items()
            if name != "all"
        }
        perplexities = {name: math.exp(value) for name, value in mean.items()}
        return MemoryEvaluation(len(part), documents, predicted, perplexities, differences, bits, near_copies)

    def __str__(self) -> str:
        rows = [("model alone", "model"), ("with memory", "all")]
        rows += [(f"without {name}", name) for name in self.perplexity if name not in ("model", "all")]
        lines = [
            f"{self.tokens:,} tokens of {self.documents} texts",
            f"{'':18}{'perplexity':>10}  {'bits/byte':>9}  with memory less that",
        ]
        for label, name in rows:
            versus = str(self.differences[name]) if name != "all" else ""
            lines.append(f"{label:18}{self.perplexity[name]:10.2f}  {self.bits_per_byte[name]:9.3f}  {versus}".rstrip())
        if not self.differences["model"].has_verdict:
            lines.append(
                f"no verdict: {self.differences['model'].units} texts or parts of {PART:,} tokens, and one needs {FEWEST}"
            )
        if self.near_copies:
            names = ", ".join(self.near_copies[:NAMED]) + (", …" if len(self.near_copies) > NAMED else "")
            lines.append(f"near copies of what is in memory, which make it look better than it is: {names}")
        return "\n".join(lines)
