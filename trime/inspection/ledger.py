"""ledger: every cell of the papers' tables, beside what was measured here.

conf/experiment/reproduce holds an experiment and its published figures a file, benchmarks/published.yaml figures and the
command that answers for each; a figure is *ok* or *off* only where a results.json of exactly that configuration exists, else
*not run*.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.inspection.published import Published, published_figures
from trime.io import plain, write_atomically
from trime.metrics import perplexity
from trime.pipeline.compose import CONF, composed
from trime.pipeline.config_hash import config_hash
from trime.report.results import results_in
from trime.report.tables import markdown

REPRODUCE = "reproduce"
STATES = ("ok", "off", "other machine", "not run")


@dataclass(frozen=True)
class Cell:
    """A published figure, and what this machine has for it; a speed has no tolerance, for it is another machine's."""

    table: str
    row: str
    column: str
    target: float
    tolerance: float | None
    experiment: str
    config_hash: str
    value: float | None = None

    @property
    def state(self) -> str:
        if self.value is None:
            return "not run"
        if self.tolerance is None:
            return "other machine"
        return "ok" if abs(self.value - self.target) <= self.tolerance else "off"


def is_published_text(run: dict[str, Any]) -> bool:
    """No split of the run's texts has another count than the published one."""
    notes = [*run["dataset"].get("notes", []), *run.get("evaluated", {}).get("notes", [])]
    return not any("are published" in note for note in notes)


def experiments() -> list[str]:
    """The names of all experiments that reproduce a figure."""
    root = CONF / "experiment"
    paths = sorted((root / REPRODUCE).glob("*/*.yaml"))
    return [path.relative_to(root).with_suffix("").as_posix() for path in paths]


def cells_of(experiment: str, config: DictConfig, runs: list[dict[str, Any]]) -> list[Cell]:
    """The figures an experiment answers for."""
    name = config_hash(config)
    found = [run for run in runs if run.get("config_hash") == name and is_published_text(run)]
    return [
        Cell(
            f"TRIME {expected['table']}",
            str(expected["row"]),
            str(expected["column"]),
            float(expected["value"]),
            None if expected["tolerance"] is None else float(expected["tolerance"]),
            experiment,
            name,
            newest(expected, found),
        )
        for expected in plain(config.expected)
    ]


def newest(expected: dict[str, Any], runs: list[dict[str, Any]]) -> float | None:
    """The last run's figure that has one."""
    values = [value for run in runs if (value := measured(expected, run)) is not None]
    return values[-1] if values else None


def measured(expected: dict[str, Any], run: dict[str, Any]) -> float | None:
    """What a run has for a figure: a row's perplexity or bits, a frequency bucket's perplexity, a retrieval accuracy in %."""
    analysis = run.get("analysis", {}).get("dev" if expected["split"] == "valid" else "test", {})
    if "bucket" in expected:
        cells = list(analysis.get("buckets", {}).values())[-1:]
        return next((cell["perplexity"] for part in cells for cell in part if cell["bucket"] == expected["bucket"]), None)
    if "retrieval" in expected:
        share = analysis.get("retrieval", {}).get(str(expected["retrieval"]))
        return None if share is None else 100 * share
    row = run["metrics"][expected["split"]][expected.get("place", -1)]
    return row[expected["measure"]] if "measure" in expected else perplexity(row["loss"])


def answered(published: Published, runs: list[dict[str, Any]]) -> Cell:
    """Return the cell of a figure that a command answers for, decided where the paper's own model is public.

    The command is composed, which takes a third of a second, only where there is a run of its experiment.
    """
    table, row, column, figure, tolerance, command = published
    found = [run for run in runs if tolerance and run["name"] == published.name]
    name = config_hash(composed(*published.overrides)) if found else ""
    values = [100 * run["metrics"]["valid"][0]["exact_match"] for run in found if run.get("config_hash") == name]
    return Cell(table, row, column, figure, tolerance, command, name, values[-1] if values else None)


def page(cells: list[Cell]) -> str:
    """The ledger: a summary, then a table of cells for each table of the papers."""
    states = [cell.state for cell in cells]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    parts = [f"# Ledger\n\n{len(cells)} published figures: {counts}. Only a run of exactly its configuration decides a cell.\n"]
    for table in dict.fromkeys(cell.table for cell in cells):
        lines = [line(cell) for cell in cells if cell.table == table]
        parts.append(
            f"## {table}\n\n" + markdown(["row", "column", "published", "ours", "±", "state", "command", "config"], lines)
        )
    return "\n".join(parts)


def line(cell: Cell) -> list[str]:
    command = f"`python cli.py experiment={cell.experiment}`"
    value, tolerance = ("" if number is None else f"{number:.2f}" for number in (cell.value, cell.tolerance))
    return [cell.row, cell.column, f"{cell.target:.2f}", value, tolerance, cell.state, command, cell.config_hash]


def write_ledger(config: DictConfig) -> Path:
    """Writes ledger.md under the outputs folder and tells how many cells hold."""
    outputs = Path(config.paths.outputs)
    runs = results_in([outputs / "runs", CONF.parent / "benchmarks" / "results"])
    cells = [cell for name in experiments() for cell in cells_of(name, composed(f"experiment={name}"), runs)]
    cells += [answered(published, runs) for published in published_figures()]
    path = outputs / "ledger.md"
    outputs.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(sorted(cells, key=lambda cell: order(cell.table))))
    states = [cell.state for cell in cells]
    print(f"ledger: {path}: " + ", ".join(f"{states.count(state)} {state}" for state in STATES))
    return path


def order(table: str) -> tuple[bool, int, str]:
    """TRIME's tables by number, then Attendre's."""
    digits = "".join(character for character in table if character.isdigit())
    return table.startswith("Attendre"), int(digits or 99), table
