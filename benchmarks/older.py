"""Name kept results that are older than the code they measure: ``python -m benchmarks.older``, which ``make pages`` runs too.

A benchmark measures the rooms of the package that it imports from: a folder each, such as trime/models/pretrained.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

from benchmarks.measure import RESULTS, ROOT


def rooms_of(name: str) -> list[str]:
    """Return the folders of the package that a benchmark imports from."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    inside = [Path(*module.split(".")) for module in modules if module.startswith("trime.")]
    return sorted({str(path if (ROOT / path).is_dir() else path.parent) for path in inside})


def changes_since(commit: str, rooms: list[str]) -> list[str] | None:
    """Return the commits after this one that changed some folders; None where it is not known here."""
    command = ["git", "log", "--oneline", f"{commit}..HEAD", "--", *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def main() -> None:
    for file in sorted(RESULTS.glob("*.json")):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or not (ROOT / "benchmarks" / f"{kept.get('name')}.py").exists():
            continue
        commit, rooms = str(kept["commit"]).partition("+")[0], rooms_of(kept["name"])
        changes = changes_since(commit, rooms) if rooms else []
        if changes is None:
            print(f"{file.name}: of {commit}, which is not in this clone")
        elif changes:
            print(f"{file.name}: of {kept['date']}; {len(changes)} later commits changed {', '.join(rooms)}")


if __name__ == "__main__":
    main()
