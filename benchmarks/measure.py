"""Side by side in one run: contestants take turns, medians and ratios, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from trime.metrics import Meter
from trime.stages.report.provenance import commit, hardware, versions
from trime.stages.report.tables import markdown

RESULTS = Path(__file__).parent / "results"


def alternately(contestants: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, dict[str, float]]:
    """Seconds (median, least, most) and peak memory of each, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    peaks = dict.fromkeys(contestants, 0.0)
    for number in range(warmup + rounds):
        for name, step in contestants.items():
            meter = Meter()
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
        }
        for name, own in seconds.items()
    }


def report(name: str, command: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> None:
    """Writes FOLDER/NAME.json and prints the table."""
    content = {
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": hardware() | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    header = list(rows[0])
    print(markdown(header, [[f"{row[key]}" for key in header] for row in rows]))
    print(f"written: {path}")
