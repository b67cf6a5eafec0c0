"""Differences between two groups of runs, with confidence intervals.

Intervals are those of the paired difference, by bootstrap over documents and seeds: each draw resamples both with
replacement, identically for the two sides. Few long documents, such as a single stream, are resampled in parts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trime.common.metrics import ARRAY_MEASURES
from trime.report.groups import Group, seed_pairs
from trime.report.run_result import FEWEST

DRAWS = 10_000


class Difference(NamedTuple):
    """The first group's value minus the other's, with the interval that holds 95 % of the bootstrap draws."""

    value: float
    low: float  # NaN where one part and one seed leave nothing to resample
    high: float
    units: int  # documents, parts or sentences: seeds do not add to them, since they share their text

    @property
    def interval(self) -> str:
        return "one part, one seed: no interval" if math.isnan(self.low) else f"[{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def significant(self) -> bool:
        """Return True if the interval excludes zero and is over enough units for a verdict."""
        return (self.low > 0 or self.high < 0) and self.has_verdict

    @property
    def has_verdict(self) -> bool:  # enough units to say whether a difference is shown
        return self.units >= FEWEST and not math.isnan(self.low)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not finite"
        few = "" if self.has_verdict or math.isnan(self.low) else " no verdict"
        return f"{self.value:+.2f} {self.interval}{few}" + " no difference shown" * (self.has_verdict and not self.significant)


def difference(one: Group, other: Group) -> Difference:
    """Return the difference of two groups' last rows on test, over the seeds that both have."""
    sides = [[run.row.documents for run in pair] for pair in seed_pairs(one, other)]
    return paired_bootstrap(np.array(sides), one.row.metric_name)


def measured_difference(one: Group, other: Group) -> Difference | None:
    """Return the difference of two groups in their measure: BLEU if they translate, else the metric of a loss."""
    return difference(one, other) if one.row.bleu is None else bleu_difference(one, other)


def interval_of(group: Group) -> tuple[float, float] | None:
    """Return the 95 % interval of a group's test result, by bootstrap over documents and seeds; None if they are too few."""
    losses = [run.row.documents for run in group.runs]
    if group.row.bleu is not None or len({len(of_run) for of_run in losses}) > 1 or len(losses[0]) < FEWEST:
        return None
    sums = np.array(losses)  # [seeds, documents, (summed loss, tokens)]
    drawn = drawn_sums(sums)
    low, high = np.percentile(ARRAY_MEASURES[group.row.metric_name](drawn[:, 0] / drawn[:, 1]), [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=2)  # drawing takes longer than all else, and the rows of a table share their documents
def draw_counts(*numbers: int) -> tuple[np.ndarray, ...]:
    """Return for each number n how often every draw of the bootstrap takes each of n units [draws n]; always the same draws."""
    # Always the same draws: a report made again has the same intervals.
    random = np.random.default_rng(0)
    return tuple(random.multinomial(n, np.full(n, 1 / n), DRAWS).astype(np.float32) for n in numbers)


def drawn_sums(values: np.ndarray) -> np.ndarray:
    """Return the sums of every draw [draws, …, x] of values [seeds, …, documents, x].

    Each draw takes the same documents and seeds everywhere: what two sides share cancels in their difference.
    """
    seed_counts, document_counts = draw_counts(len(values), values.shape[-2])
    by_seed = np.tensordot(document_counts, values, (1, -2))  # one product, of many documents too
    return np.einsum("rs,rs...->r...", seed_counts, by_seed)


def paired_bootstrap(sides: np.ndarray, metric: str) -> Difference:
    """Return the difference in a metric between two sides, given as [seeds, 2, documents, (summed loss, tokens)]."""
    seeds, _, count, _ = sides.shape
    sums = drawn_sums(sides)
    to_metric = ARRAY_MEASURES[metric]
    draws = to_metric(sums[..., 0] / sums[..., 1])
    low, high = np.percentile(draws[:, 0] - draws[:, 1], [2.5, 97.5]) if seeds * count > 1 else (math.nan, math.nan)
    total = sides.sum((0, 2))
    value = to_metric(total[:, 0] / total[:, 1])
    return Difference(float(value[0] - value[1]), float(low), float(high), count)


def corpus_bleu(sums: np.ndarray) -> np.ndarray:
    """Return corpus BLEU (Papineni et al. 2002) of summed statistics [..., 10].

    The statistics are matching n-grams by order, all n-grams by order, and the lengths of hypothesis and reference. The k-th
    order without a match counts as 2^-k matches, as in ``scores``: exponential smoothing (Chen and Cherry 2014).
    """
    matches, total, length, reference = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    smoothed = np.where(matches == 0, 0.5 ** (matches == 0).cumsum(-1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.exp(np.log(smoothed / total).mean(-1) + np.minimum(0, 1 - reference / length))
    return np.where(matches.any(-1) & total.all(-1), 100 * score, 0.0)


def bleu_difference(one: Group, other: Group) -> Difference | None:
    """Return the difference in BLEU by paired bootstrap over sentences (Koehn 2004) and seeds; None without statistics."""
    statistics = [[run.row.bleu_statistics for run in pair] for pair in seed_pairs(one, other)]
    if not all(side for pair in statistics for side in pair):
        return None
    sides = np.array(statistics, dtype=float)  # [seeds, 2, sentences, 10]
    seeds, _, count, _ = sides.shape
    seed_counts, sentence_counts = draw_counts(seeds, count)
    # BLEU is no mean over sentences: it is computed anew from the sums of each draw.
    draws = np.stack([[corpus_bleu(sentence_counts @ side) for side in pair] for pair in sides])  # [seeds, 2, draws]
    differences = ((draws[:, 0] - draws[:, 1]).T * seed_counts).sum(1) / seeds
    total = corpus_bleu(sides.sum(2))
    low, high = np.percentile(differences, [2.5, 97.5])
    return Difference(float((total[:, 0] - total[:, 1]).mean()), float(low), float(high), count)
