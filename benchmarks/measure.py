"""Measurements side by side: contestants take turns, medians and ratios, claims with bounds, results as JSON and tables."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from trime.common.metrics import ResourceUsage
from trime.lab.provenance import commit, hardware, versions
from trime.report.tables import markdown

Name = TypeVar("Name")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Claim(NamedTuple):
    """A claim about the rows: its value and upper bound. The value is None if it was not run here, inf if no row qualifies."""

    claim: str
    value: float | None
    bound: float

    @property
    def holds(self) -> bool | str:
        """Return whether the value is within its bound, or ``not run``."""
        return "not run" if self.value is None else self.value <= self.bound

    def content(self) -> dict[str, Any]:
        """Return the claim for JSON, which has no infinity."""
        value = None if self.value is None or math.isinf(self.value) else self.value
        return {"claim": self.claim, "value": value, "bound": self.bound, "holds": self.holds}


class Measured(NamedTuple):
    """The results of a benchmark."""

    rows: list[dict[str, Any]]
    claims: list[Claim]


def alternately(contestants: Mapping[Name, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[Name, dict[str, Any]]:
    """Return seconds (median, minimum, maximum, of every round) and peak memory of contestants that take turns.

    The order is shuffled in each round, so that what one leaves behind, such as a cold cache, does not always affect the same
    one. The first ``warmup`` rounds are not counted.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in contestants}
    peaks = dict.fromkeys(contestants, 0.0)
    turns = list(contestants.items())
    for number in range(warmup + rounds):
        for name, step in random.Random(number).sample(turns, len(turns)):
            meter = ResourceUsage()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - meter.start
            if number >= warmup:
                seconds[name].append(elapsed)
                peaks[name] = max(peaks[name], meter.peak_memory_mb)
    return {
        name: {
            "median_seconds": round(statistics.median(times), 5),
            "least_seconds": round(min(times), 5),
            "most_seconds": round(max(times), 5),
            "peak_memory_mb": peaks[name],
            "rounds": times,
        }
        for name, times in seconds.items()
    }


def share(one: float, other: float) -> float | None:
    """Return one number divided by another; None if that is zero."""
    return one / other if other else None


def ratio(one: list[float], other: list[float]) -> float:
    """Return the median over rounds of one contestant's time divided by another's: load on the machine slows down both."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def publish(name: str, command: str, measured: Measured, file: Path) -> None:
    """Write the results as JSON and print them as tables."""
    content = {
        "name": name,
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": hardware() | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "rows": measured.rows,
        "claims": [claim.content() for claim in measured.claims],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    header = list(dict.fromkeys(key for row in measured.rows for key in row))
    print(markdown(header, [[f"{row.get(key, '')}" for key in header] for row in measured.rows]))
    if measured.claims:
        lines = [
            [claim.claim, "" if claim.value is None else f"{claim.value:.3g}", f"{claim.bound:g}", holds_text(claim)]
            for claim in measured.claims
        ]
        print(markdown(["claim", "value", "at most", "holds"], lines))
    print(f"written: {file}")


def holds_text(claim: Claim) -> str:
    """Return whether a claim holds, in a word."""
    return claim.holds if isinstance(claim.holds, str) else "yes" if claim.holds else "no"
