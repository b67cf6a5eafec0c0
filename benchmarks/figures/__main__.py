"""``make check-figures``: check every number printed in README.md and the documentation against its JSON."""

from __future__ import annotations

import sys

from benchmarks.figures.check import check
from benchmarks.measure import ROOT


def main() -> int:
    """Print all faults; return the exit status, 1 if there are any."""
    faults = check(ROOT)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} figures do not match their sources" if faults else "all figures match their sources")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
