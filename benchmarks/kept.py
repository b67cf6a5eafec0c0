"""Kept results: one file a campaign, with a run's results in each line.

``python -m benchmarks.kept FOLDER NAME`` adds what ``report.keep=FOLDER`` has kept to benchmarks/results/NAME.jsonl; a run that
was made again takes the place of its line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS


def kept_in(file: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a campaign by their names; none where there is no such file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {line["name"]: line["results"] for line in map(json.loads, lines)}


def keep(folder: Path, file: Path) -> int:
    """Add the results below a folder to a campaign's file, by name; return how many there are in it."""
    kept = kept_in(file)
    for path in folder.rglob("*.json"):
        name = str(path.relative_to(folder).with_suffix("")).removesuffix("/results")
        kept[name] = json.loads(path.read_text(encoding="utf-8"))
    lines = [json.dumps({"name": name, "results": kept[name]}, ensure_ascii=False) + "\n" for name in sorted(kept)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    return len(kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where report.keep has kept results")
    parser.add_argument("name", help="of the campaign, as tables/main")
    options = parser.parse_args()
    print(f"{keep(options.folder, RESULTS / f'{options.name}.jsonl')} results in {RESULTS / options.name}.jsonl")
