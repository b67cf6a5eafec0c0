"""Drawing of a report's samples, one after another, within some minutes; each is kept, also when the process is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trime.common.io import write_atomically
from trime.common.progress import Progress

Sample = dict[str, Any]


class OutOfTimeError(Exception):
    """The next sample would not be drawn in time; ``samples`` are there already, ``total`` are wanted."""

    def __init__(self, samples: list[Sample], total: int, minutes: float):
        super().__init__(
            f"{len(samples)} of {total} passages are on the page, the next would end after report.samples.minutes={minutes:g}: "
            "the same command draws more, report.samples.minutes=null all"
        )
        self.samples = samples


def draw_all(
    draws: Sequence[Callable[[], Sample]], folder: Path, minutes: float | None, clock: Callable[[], float]
) -> list[Sample]:
    """Return all samples, drawing those that ``folder`` does not hold; ``clock`` returns seconds.

    At least one is drawn. OutOfTimeError if the next one, taking as long as those before, would end after ``minutes``.
    """
    samples: list[Sample] = []
    started, drawn = clock(), 0
    with Progress(total=len(draws), desc="passages for the page") as bar:
        for number, draw in enumerate(draws):
            file = folder / f"part-{number:03d}.json"
            if not file.exists():
                if minutes is not None and drawn and (clock() - started) * (drawn + 1) / drawn > 60 * minutes:
                    raise OutOfTimeError(samples, len(draws), minutes)
                write_atomically(file, json.dumps(draw(), ensure_ascii=False))
                drawn += 1
            samples.append(json.loads(file.read_text(encoding="utf-8")))
            bar.update()
    return samples
