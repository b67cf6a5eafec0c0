"""ledger: every cell of the papers' tables beside what was measured here.

The experiments of conf/experiment/reproduce list the published results that they reproduce (``expected``), and
conf/published_attendre.yaml lists others with the command that reproduces each. A cell is *ok* or *off* only if a results.json
of exactly that configuration exists, otherwise *not run*. Below each table stand the deviations that its rows state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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

CELL_KEYS = ("table", "row", "column", "value", "tolerance", "split")  # of every expected result
SHARED = Path("/experiment/reproduce")  # where the files lie that rows share
STATES = ("ok", "off", "other machine", "not run")


@dataclass(frozen=True)
class Cell:
    """A published result and the value measured here; speeds have no tolerance, because they depend on the machine."""

    table: str
    row: str
    column: str
    target: float
    tolerance: float | None
    experiment: str  # and its overrides
    config_hash: str = ""
    value: float | None = None

    @property
    def state(self) -> str:
        """Return one of STATES."""
        if self.value is None:
            return "not run"
        if self.tolerance is None:
            return "other machine"
        return "ok" if abs(self.value - self.target) <= self.tolerance else "off"

    def is_of(self, run: RunResult) -> bool:
        """Return True if the experiment gives its runs this run's name."""
        return run.name == self.experiment.split()[0].replace("/", "_")


def reproductions() -> dict[str, dict[str, Any]]:
    """Return the section ``expected`` of each experiment reproduce/TABLE/ROW: its own settings over those of its defaults."""
    found, folder = {}, CONF / "experiment" / "reproduce"
    for file in sorted(folder.glob("*/*.yaml")):
        own = yaml.safe_load(file.read_text(encoding="utf-8"))
        shared = [folder / f"{Path(name).name}.yaml" for name in own["defaults"] if Path(str(name)).parent == SHARED]
        parts = [yaml.safe_load(path.read_text(encoding="utf-8")).get("expected", {}) for path in shared]
        found[f"reproduce/{file.parent.name}/{file.stem}"] = plain(OmegaConf.merge(*parts, own.get("expected", {})))
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


def reproduced_cells(
    experiment: str, expected: dict[str, Any], runs: list[RunResult], config: DictConfig | None = None
) -> list[Cell]:
    """Return the cells that an experiment expects, each with the value of the last run of exactly its configuration.

    ``config`` is that configuration; None: compose it.
    """
    found = []
    for content in expected_cells(expected):
        target, tolerance = float(content["value"]), content["tolerance"]
        table, row, column = f"TRIME {content['table']}", str(content["row"]), str(content["column"])
        cell = Cell(table, row, column, target, None if tolerance is None else float(tolerance), experiment)
        # Composing takes a third of a second: too long for each of some hundred experiments that were never run.
        if config is None and any(cell.is_of(run) for run in runs):
            config = compose_config(f"experiment={experiment}")
        if config is not None:
            name = config_hash(config)
            values = [
                value
                for run in scored_runs(runs)
                # A text of another size than the published one decides nothing.
                if run.config_hash == name
                and not any("are published" in note for note in [*run.dataset.notes, *run.evaluated.notes])
                and (value := measured_value(content, run)) is not None
            ]
            cell = replace(cell, config_hash=name, value=values[-1] if values else None)
        found.append(cell)
    return found


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


def answered_cells() -> list[Cell]:
    """Return the published results that a command reproduces: exact match in %, without values.

    ``tolerance`` is None if the paper's model is not public.
    """
    # A row names an experiment, a column the overrides that make it a column's command.
    tables = yaml.safe_load((CONF / "published_attendre.yaml").read_text(encoding="utf-8"))
    return [
        Cell(table, row, column, value, content.get("tolerance"), f"{description['experiment']} {override}")
        for table, content in tables.items()
        for row, description in content["rows"].items()
        for (column, override), value in zip(content["columns"].items(), description["results"], strict=True)
    ]


def with_answers(cell: Cell, runs: list[RunResult]) -> Cell:
    """Return one of ``answered_cells`` with the value of the last run of its command, if the paper's model is public."""
    answering = [run for run in runs if cell.tolerance and cell.is_of(run) and isinstance(run, AnsweringRun)]
    if not answering:  # no need to compose the command
        return cell
    name = config_hash(compose_config(*f"experiment={cell.experiment}".split()))
    values = [100 * run.metrics["valid"][0].exact_match for run in answering if run.config_hash == name]
    return replace(cell, config_hash=name, value=values[-1] if values else None)


def ledger_page(cells: list[Cell]) -> str:
    """Return the ledger in Markdown: a summary, then a table of cells for each table of the papers."""
    described = reproductions()
    summary = f"{len(cells)} published results: {counts(cells)}. Only a run of exactly its configuration decides a cell."
    parts = [f"# Ledger\n\n{summary}\n"]
    for table in dict.fromkeys(cell.table for cell in cells):
        own, lines = [cell for cell in cells if cell.table == table], []
        for cell in own:
            value, tolerance = ("" if number is None else f"{number:.2f}" for number in (cell.value, cell.tolerance))
            command = f"`python cli.py experiment={cell.experiment}`"
            numbers = [f"{cell.target:.2f}", value, tolerance]
            lines.append([cell.row, cell.column, *numbers, cell.state, command, cell.config_hash])
        header = ["row", "column", "published", "ours", "±", "state", "command", "config"]
        parts.append(f"## {table}\n\n" + markdown(header, lines))
        names = [name for name in dict.fromkeys(cell.experiment for cell in own) if name in described]
        deviations = [f"- `{name}`: {text}" for name in names for text in described[name].get("deviations", {}).values()]
        parts += ["Deviations:\n", *deviations, ""] if deviations else []
    return "\n".join(parts)


def counts(cells: list[Cell]) -> str:
    """Return how many cells are in each state."""
    states = [cell.state for cell in cells]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES)


def write_ledger(config: DictConfig) -> Path:
    """Write ledger.md in the outputs folder and print how many cells are in each state; return its path."""
    outputs = Path(config.paths.outputs).expanduser()
    # Kept results count, too: a clone without runs of its own shows what was measured when they were made.
    runs = results_in([outputs / "runs", CONF.parent / "benchmarks" / "results"])
    cells = [cell for name, expected in reproductions().items() for cell in reproduced_cells(name, expected, runs)]
    cells += [with_answers(cell, runs) for cell in answered_cells()]
    # TRIME's tables by number, then Attendre's
    cells.sort(key=lambda cell: (cell.table.startswith("Attendre"), int(re.sub(r"\D", "", cell.table) or 99), cell.table))
    path = outputs / "ledger.md"
    outputs.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ledger_page(cells))
    print(f"ledger: {path}: {counts(cells)}")
    return path


LEDGER = Stage("ledger", on_config=write_ledger)
