"""``make check-figures``: check all figures of README.md and of the pages of results against their JSON."""

from __future__ import annotations

import sys

from benchmarks.figures.check import check
from benchmarks.measure import ROOT


def main() -> int:
    """Print what is wrong; 1 where anything is."""
    faults = check(ROOT)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} figures are not what their sources say" if faults else "all figures are what their sources say")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
