"""The first run of a newcomer: from an empty clone to the table, by stage, in elapsed and in processor time.

The committed code is cloned into an empty folder; there ``make install`` and the table of ``make run`` are run. Stages
are those of its runs, summed; ``start`` is the import of its modules, and the checks before their first stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import ROOT, Claim, Measured

TABLE = "table=first"  # of make run
BOUND = 6.0  # minutes

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the run")


def measure(options: argparse.Namespace) -> Measured:
    """Return what each stage takes; in the last line, all of it."""
    with TemporaryDirectory() as folder:
        clone, profile = Path(folder) / "clone", Path(folder) / "profile.json"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        rows = [timed("install", ["make", "install"], clone)]
        words = [".venv/bin/python", "-m", "benchmarks.first_run", str(profile), TABLE, *options.set]
        whole = timed("whole", words, clone)
        stages = json.loads(profile.read_text())
        rest = {name: whole[name] - sum(stage[name] for stage in stages) for name in ("seconds", "processor seconds")}
        rows += [{"stage": "start", **rest}, *stages]
    total = {name: sum(row[name] for row in rows) for name in ("seconds", "processor seconds")}
    rounded = [{key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    rounded.append({"stage": "all", **{name: round(value, 1) for name, value in total.items()}})
    return Measured(rounded, [Claim("minutes from an empty clone to the table", round(total["seconds"] / 60, 2), BOUND)])


def timed(name: str, command: list[str], folder: Path) -> Row:
    """Run a command in a folder; return its elapsed and its processor seconds."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"stage": name, "seconds": time.perf_counter() - started, "processor seconds": processor}


def profile(file: Path, words: list[str]) -> int:
    """Run the command line with some words, and write what each stage took; return its exit status."""
    from trime.common.metrics import ResourceUsage
    from trime.lab import command_line, runner

    rows: dict[str, Row] = {}
    run_stage = runner.run_stage

    def noted(graph: Any, stage: Any) -> Any:
        meter = ResourceUsage()
        outcome, note = run_stage(graph, stage), meter.note()
        row = rows.setdefault(stage.name, {"stage": stage.name, "seconds": 0.0, "processor seconds": 0.0})
        row["seconds"] += note["seconds"]
        row["processor seconds"] += note["processor_seconds"]
        return outcome

    runner.run_stage = noted
    sys.argv = ["cli.py", *words]
    status = command_line.main()
    file.write_text(json.dumps([*rows.values()]))
    return status


if __name__ == "__main__":
    sys.exit(profile(Path(sys.argv[1]), sys.argv[2:]))
