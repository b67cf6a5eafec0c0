"""How far two groups of runs are apart, with an interval.

Intervals are of the paired difference, by bootstrap over documents and seeds: a draw takes as many of both,
with replacement, for both sides alike. Where there are few documents, such as one stream, it draws parts of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from trime.metrics import MEASURES
from trime.report.groups import Group, documents, pairs
from trime.report.tables import unit

DRAWS = 10_000


class Difference(NamedTuple):
    """Of a measure: the first side's less the other's, with the interval that holds 95 % of the draws.

    Of one part and one seed there is nothing to draw from: the interval is NaN.
    """

    value: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        return "one part, one seed: no interval" if math.isnan(self.low) else f"[{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def shown(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} {self.interval}" + ("" if self.shown or math.isnan(self.low) else " no difference shown")


def difference(one: Group, other: Group) -> Difference:
    """Of the own rows on test, over the seeds that both have."""
    return apart(np.array([[documents(run) for run in pair] for pair in pairs(one, other)]), unit(one.row))


def apart(sides: np.ndarray, kind: str) -> Difference:
    """Return the difference of two sides [seeds, 2, documents, (loss, tokens)] in a measure."""
    seeds, _, count, _ = sides.shape
    draw = np.random.default_rng(0)
    of_seeds, of_documents = (draw.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (seeds, count))
    sums = np.einsum("rs,spdx,rd->rpx", of_seeds, sides, of_documents)
    measured = np.vectorize(MEASURES[kind])
    drawn = measured(sums[..., 0] / sums[..., 1])
    low, high = np.percentile(drawn[:, 0] - drawn[:, 1], [2.5, 97.5]) if seeds * count > 1 else (math.nan, math.nan)
    whole = sides.sum((0, 2))
    value = measured(whole[:, 0] / whole[:, 1])
    return Difference(float(value[0] - value[1]), float(low), float(high))


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """Corpus BLEU (Papineni et al. 2002) of summed statistics [... 10]: n-grams that match, all, length, the reference's.

    The k-th order without a match counts as 2^-k matches, as in ``scores``: exponential smoothing (Chen and Cherry 2014).
    """
    match, every, own, reference = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    smoothed = np.where(match == 0, 0.5 ** (match == 0).cumsum(-1), match)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.exp(np.log(smoothed / every).mean(-1) + np.minimum(0, 1 - reference / own))
    return np.where(match.any(-1) & every.all(-1), 100 * score, 0.0)


def bleu_difference(one: Group, other: Group) -> Difference | None:
    """Of the mean BLEU over seeds, by paired bootstrap over sentences (Koehn 2004) and seeds; None where it was not kept."""
    kept = [[run["metrics"]["test"][-1].get("bleu_statistics") for run in pair] for pair in pairs(one, other)]
    if not all(side for pair in kept for side in pair):
        return None
    sides = np.array(kept, dtype=float)  # [seeds, 2, sentences, 10]
    seeds, _, count, _ = sides.shape
    draw = np.random.default_rng(0)
    of_seeds, of_sentences = (draw.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (seeds, count))
    drawn = np.stack([[bleu_of(of_sentences @ side) for side in pair] for pair in sides])  # [seeds, 2, draws]
    apart = ((drawn[:, 0] - drawn[:, 1]).T * of_seeds).sum(1) / seeds
    whole = bleu_of(sides.sum(2))
    low, high = np.percentile(apart, [2.5, 97.5])
    return Difference(float((whole[:, 0] - whole[:, 1]).mean()), float(low), float(high))
