"""Side by side in one run: contestants take turns, medians and ratios; claims with their bounds; as JSON and as a table."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from trime.metrics import ResourceUsage
from trime.report.tables import markdown
from trime.run.provenance import commit, hardware, versions

Name = TypeVar("Name")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Claim(NamedTuple):
    """What is said of the rows, its value and the most that it may be; no value: it was not run here, inf: nothing fits."""

    claim: str
    value: float | None
    bound: float

    @property
    def holds(self) -> bool | str:
        return "not run" if self.value is None else self.value <= self.bound

    def content(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        value = None if self.value is None or math.isinf(self.value) else self.value
        return {"claim": self.claim, "value": value, "bound": self.bound, "holds": self.holds}


class Measured(NamedTuple):
    """What a benchmark found."""

    rows: list[dict[str, Any]]
    claims: list[Claim]


def alternately(contestants: dict[Name, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[Name, dict[str, Any]]:
    """Seconds (median, least, most, of every round) and peak memory of each, one after the other in every round.

    Each round has an order of its own: what one leaves behind, such as cold memory, does not always meet the same one.
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
            "median_seconds": round(statistics.median(own), 5),
            "least_seconds": round(min(own), 5),
            "most_seconds": round(max(own), 5),
            "peak_memory_mb": peaks[name],
            "rounds": own,
        }
        for name, own in seconds.items()
    }


def composed(settings: list[str]) -> DictConfig:
    """The configuration of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", settings)


def share(one: float, other: float) -> float | None:
    """One over another; of nothing there is no share."""
    return one / other if other else None


def ratio(one: list[float], other: list[float]) -> float:
    """The median over rounds of one contestant's time over another's: what slows a round down slows both."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def publish(name: str, command: str, found: Measured, file: Path) -> None:
    """Writes the figures and prints them as tables."""
    content = {
        "name": name,
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": hardware() | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "rows": found.rows,
        "claims": [claim.content() for claim in found.claims],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    header = list(dict.fromkeys(key for row in found.rows for key in row))
    print(markdown(header, [[f"{row.get(key, '')}" for key in header] for row in found.rows]))
    if found.claims:
        lines = [
            [claim.claim, "" if claim.value is None else f"{claim.value:.3g}", f"{claim.bound:g}", told(claim)]
            for claim in found.claims
        ]
        print(markdown(["claim", "value", "at most", "holds"], lines))
    print(f"written: {file}")


def told(claim: Claim) -> str:
    """Whether it holds, in a word."""
    return claim.holds if isinstance(claim.holds, str) else "yes" if claim.holds else "no"
