"""``make check-numbers``: check every number printed in README.md and the documentation against its JSON."""

from __future__ import annotations

import sys

from benchmarks.measure import ROOT
from benchmarks.numbers.check import check


def main() -> int:
    """Print all faults; return the exit status, 1 if there are any."""
    faults = check(ROOT)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} numbers do not match their sources" if faults else "all numbers match their sources")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
