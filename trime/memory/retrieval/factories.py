"""Factory strings of an index: the choice of index=auto, and the numbers that a string leaves out."""

from __future__ import annotations

import math
import os
import re

from trime.memory.retrieval.search import MIN_POINTS_PER_CELL

AUTO = "auto"  # index.factory: chosen by the number of keys
EXACT_UP_TO = 2**17  # keys that index=auto searches exactly: about ten milliseconds per 100 queries


def choose_factory(entries: int, width: int, parts: int = 1) -> str | None:
    """Return the factory of index=auto: exact if that is fast, cells if a part's keys fit in half the memory, else PQ codes."""
    if entries <= EXACT_UP_TO:
        return None
    return complete_factory("Cells" if 2 * width * entries / parts <= machine_memory() / 2 else "IVF_PQ", entries, width)


def complete_factory(factory: str | None, entries: int, width: int) -> str | None:
    """Fill in the numbers that a factory string leaves out: about √n cells, half of the dimensions, at most 64 codes."""
    if factory is None:
        return None
    cells = max(1, min(2 ** round(math.log2(math.sqrt(entries))), entries // MIN_POINTS_PER_CELL))
    half = max(1, width // 2)
    pca = re.search(r"PCA\w*?(\d+)", factory)
    reduced = int(pca[1]) if pca else half if "PCA" in factory else width
    codes = next(n for n in (64, 32, 16, 8, 4, 2, 1) if reduced % n == 0 and (n <= reduced // 2 or n == 1))
    defaults = {"Cells": cells, "IVF": cells, "PCA": half, "PCAR": half, "PQ": codes, "OPQ": codes}
    return "_".join(f"{part}{defaults.get(part, '')}" for part in re.split("[_,]", factory))


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cell_count(factory: str) -> int:
    """Return the number of cells in a factory string."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)
