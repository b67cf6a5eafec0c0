"""``python -m scripts.torture settings|files|names|together|kills``: run a campaign and print what became of it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from scripts.torture.outcome import GOOD, Case, summary

CAMPAIGNS = ("settings", "files", "names", "together", "kills")


def main() -> int:
    """Run the chosen campaigns; return 1 if an attempt went wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.torture", description=__doc__)
    parser.add_argument("campaign", nargs="*", choices=[*CAMPAIGNS, []], help="all of them by default")
    parser.add_argument("--count", type=int, help="number of attempts, drawn at random; by default all, or as many as usual")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every attempt to this file")
    options = parser.parse_args()
    every: dict[str, list[Case]] = {}
    for name in options.campaign or CAMPAIGNS:
        cases = every[name] = importlib.import_module(f"scripts.torture.{name}").campaign(options.count, options.seed)
        for case in cases:
            if case.outcome not in GOOD:
                print(f"{case.outcome}: {case.what}: {case.message}")
        print(f"{name}: {summary(cases)}")
    if options.json:
        options.json.write_text(
            json.dumps({name: [case._asdict() for case in cases] for name, cases in every.items()}, indent=1)
        )
    return int(any(case.outcome not in GOOD for cases in every.values() for case in cases))


if __name__ == "__main__":
    sys.exit(main())
