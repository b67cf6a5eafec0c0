"""How long the rest of a sweep will take, by what its runs have taken so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def count_runs(words: Sequence[str]) -> int:
    """Return how many runs the choices in overrides make, the later ones of a setting; 0 if they cannot be read."""
    try:
        overrides = OverridesParser.create().parse_overrides([*words])
    except HydraException:  # Hydra says it when it reads them
        return 0
    counts = {each.get_key_element(): len([*each.sweep_iterator()]) if each.is_discrete_sweep() else 1 for each in overrides}
    return math.prod(counts.values())


def forecast(seconds: Sequence[float | None], runs: int) -> str:
    """Return a line on a sweep of ``runs`` whose first ones took ``seconds``; None for one that made nothing new.

    Such a run was complete already, or failed: it says nothing of how long another one takes.
    """
    number, last, took = len(seconds), seconds[-1], [each for each in seconds if each is not None]
    line = f"run {number} of {runs} " + (f"took {duration(last)}" if last is not None else "had nothing to make")
    if not took or number >= runs:
        return line
    return f"{line}: about {duration(mean(took) * (runs - number))} more"


def duration(seconds: float) -> str:
    """Return seconds as a person says them, as in ``40 s``, ``4 min`` and ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
