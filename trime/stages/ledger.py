"""ledger: every cell of the papers' tables beside what was measured here.

The experiments of conf/experiment/reproduce list the published results that they reproduce (``expected``), and
conf/published_attendre.yaml lists others with the command that reproduces each. A cell is *ok* or *off* only if a results.json
of exactly that configuration exists, otherwise *not run*. Below each table stand the deviations that its rows state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from trime.common.io import plain, write_atomically
from trime.common.metrics import perplexity
from trime.config.compose import compose_config
from trime.config.folder import CONF
from trime.lab.config_hash import config_hash
from trime.lab.stage import Stage
from trime.report.results import results_in
from trime.report.run_result import AnsweringRun, RunResult, ScoredRun, scored_runs
from trime.report.tables import markdown
from trime.stages.published import PublishedCell, published_cells

REPRODUCTIONS = CONF / "experiment" / "reproduce"
CELL_KEYS = ("table", "row", "column", "value", "tolerance", "split")  # of every expected result
STATES = ("ok", "off", "other machine", "not run")


@dataclass(frozen=True)
class Cell:
    """A published result and the value measured here; speeds have no tolerance, because they depend on the machine."""

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
        """Return one of STATES."""
        if self.value is None:
            return "not run"
        if self.tolerance is None:
            return "other machine"
        return "ok" if abs(self.value - self.target) <= self.tolerance else "off"


def is_published_text(run: ScoredRun) -> bool:
    """Return True if no split of the run's texts differs in size from the published one."""
    return not any("are published" in note for note in [*run.dataset.notes, *run.evaluated.notes])


def reproductions() -> dict[str, dict[str, Any]]:
    """Return the section ``expected`` of each experiment reproduce/TABLE/ROW: its own settings over those of its table."""
    found = {}
    for file in sorted(REPRODUCTIONS.glob("*/*.yaml")):
        files = file.parent.with_suffix(".yaml"), file
        parts = [yaml.safe_load(path.read_text(encoding="utf-8")).get("expected", {}) for path in files]
        found[f"reproduce/{file.parent.name}/{file.stem}"] = plain(OmegaConf.merge(*parts))
    return found


def expected_cells(expected: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the published results that an experiment expects; a tolerance in % is relative to the value."""
    cells = []
    for column, cell in expected.get("cells", {}).items():
        shared = {"row": expected.get("row", ""), "column": column} | expected["shared"] | expected["columns"][column]
        content = shared | (cell if isinstance(cell, dict) else {"value": cell})
        if isinstance(content["tolerance"], str):
            content["tolerance"] = round(float(content["tolerance"].removesuffix("%")) / 100 * content["value"], 3)
        cells.append({key: content[key] for key in CELL_KEYS} | content)
    return cells


def row_cells(experiment: str, expected: dict[str, Any], runs: list[RunResult]) -> list[Cell]:
    """Return the cells that an experiment expects.

    It is composed, which takes a third of a second, only if there is a run of its name.
    """
    if any(run.name == experiment.replace("/", "_") for run in runs):
        return cells_of(experiment, compose_config(f"experiment={experiment}"), runs)
    return [cell_of(experiment, cell, "", []) for cell in expected_cells(expected)]


def cells_of(experiment: str, config: DictConfig, runs: list[RunResult]) -> list[Cell]:
    """Return the cells that an experiment expects, with values from runs of exactly its configuration."""
    name = config_hash(config)
    matching = [run for run in scored_runs(runs) if run.config_hash == name and is_published_text(run)]
    return [cell_of(experiment, cell, name, matching) for cell in expected_cells(plain(config.expected))]


def cell_of(experiment: str, expected: dict[str, Any], name: str, runs: list[ScoredRun]) -> Cell:
    """Return a cell with the value of the last of an experiment's runs, whose configuration's hash is ``name``."""
    return Cell(
        f"TRIME {expected['table']}",
        str(expected["row"]),
        str(expected["column"]),
        float(expected["value"]),
        None if expected["tolerance"] is None else float(expected["tolerance"]),
        experiment,
        name,
        latest_value(expected, runs),
    )


def latest_value(expected: dict[str, Any], runs: list[ScoredRun]) -> float | None:
    """Return the value of the last run that has it; None if none has."""
    values = [value for run in runs if (value := measured_value(expected, run)) is not None]
    return values[-1] if values else None


def measured_value(expected: dict[str, Any], run: ScoredRun) -> float | None:
    """Return what a run measured for a cell: a row's metric, a frequency bucket's perplexity, or retrieval accuracy in %."""
    analysis = run.analysis.get(expected["split"])
    if "bucket" in expected:
        cells = [*analysis.buckets.values()][-1] if analysis else []
        return next((cell.perplexity for cell in cells if cell.bucket == expected["bucket"]), None)
    if "retrieval" in expected:
        share = analysis.retrieval.get(str(expected["retrieval"])) if analysis else None
        return None if share is None else 100 * share
    row = run.metrics[expected["split"]][expected.get("row_index", -1)]
    measured: float | None = getattr(row, expected["measure"]) if "measure" in expected else perplexity(row.loss)
    return measured


def published_cell(published: PublishedCell, runs: list[RunResult]) -> Cell:
    """Return the cell of a published result that a command reproduces; it has a value only if the paper's model is public.

    The command is composed, which takes a third of a second, only if there is a run of its experiment.
    """
    table, row, column, target, tolerance, command = published
    candidates = [run for run in runs if tolerance and run.name == published.name and isinstance(run, AnsweringRun)]
    name = config_hash(compose_config(*published.overrides)) if candidates else ""
    values = [100 * run.metrics["valid"][0].exact_match for run in candidates if run.config_hash == name]
    return Cell(table, row, column, target, tolerance, command, name, values[-1] if values else None)


def ledger_page(cells: list[Cell]) -> str:
    """Return the ledger in Markdown: a summary, then a table of cells for each table of the papers."""
    states = [cell.state for cell in cells]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    parts = [f"# Ledger\n\n{len(cells)} published results: {counts}. Only a run of exactly its configuration decides a cell.\n"]
    for table in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == table]
        header = ["row", "column", "published", "ours", "±", "state", "command", "config"]
        parts.append(f"## {table}\n\n" + markdown(header, [cell_line(cell) for cell in own]))
        parts.extend(deviation_lines(dict.fromkeys(cell.experiment for cell in own)))
    return "\n".join(parts)


def deviation_lines(names: Iterable[str]) -> list[str]:
    """Return a Markdown list of what experiments do otherwise than the paper or the published command."""
    rows = reproductions()
    lines = [f"- `{name}`: {text}" for name in names if name in rows for text in rows[name].get("deviations", {}).values()]
    return ["Deviations:\n", *lines, ""] if lines else []


def cell_line(cell: Cell) -> list[str]:
    """Return the table line of a cell."""
    command = f"`python cli.py experiment={cell.experiment}`"
    value, tolerance = ("" if number is None else f"{number:.2f}" for number in (cell.value, cell.tolerance))
    return [cell.row, cell.column, f"{cell.target:.2f}", value, tolerance, cell.state, command, cell.config_hash]


def write_ledger(config: DictConfig) -> Path:
    """Write ledger.md in the outputs folder and print how many cells are in each state; return its path."""
    outputs = Path(config.paths.outputs).expanduser()
    runs = results_in([outputs / "runs", CONF.parent / "benchmarks" / "results"])
    cells = [cell for name, expected in reproductions().items() for cell in row_cells(name, expected, runs)]
    cells += [published_cell(published, runs) for published in published_cells()]
    path = outputs / "ledger.md"
    outputs.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ledger_page(sorted(cells, key=lambda cell: table_order(cell.table))))
    states = [cell.state for cell in cells]
    print(f"ledger: {path}: " + ", ".join(f"{states.count(state)} {state}" for state in STATES))
    return path


def table_order(table: str) -> tuple[bool, int, str]:
    """Return a sort key: TRIME's tables by number, then Attendre's."""
    digits = "".join(character for character in table if character.isdigit())
    return table.startswith("Attendre"), int(digits or 99), table


LEDGER = Stage("ledger", on_config=write_ledger)
