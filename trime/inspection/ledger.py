"""ledger: every cell of the papers' tables, beside what was measured here.

conf/experiment/reproduce holds an experiment and its published figures a file, benchmarks/published.yaml figures and the
command that answers for each; a figure is *ok* or *off* only where a results.json of exactly that configuration exists, else
*not run*.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from trime.inspection.published import Published, published_figures
from trime.metrics import perplexity
from trime.pipeline.artefact import plain, write_aside
from trime.report.tables import markdown
from trime.types import UserError

CONF = Path(__file__).resolve().parents[2] / "conf"
REPRODUCE = "reproduce"
APART = (
    "paths",
    "logger",
    "report",
    "frontier",
    "stages",
    "seed",
    "expected",
    "name",
    "dictionary",
)  # no figure depends on them
HARMLESS = {
    "train": ("checkpoint_every", "log_every"),
    "evaluate": ("batch_tokens", "analysis", "subsets"),
    "trainer": ("accelerator", "devices", "enable_progress_bar"),
    "answering": ("batch",),
    "questions": ("path", "babi", "background"),
}
VALIDATION = ("validate_every", "validate_tokens")
STATES = ("ok", "off", "other machine", "not run")
PLACES = ("path", "cache")  # of a dataset: what is read there is known by its counts


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


def config_hash(config: DictConfig) -> str:
    """Names what decides a run's figures: its configuration without places, loggers, devices and seeds.

    A released checkpoint counts by the name of its folder, text by its dataset's settings, not by where it lies.
    """
    content = {key: value for key, value in plain(config).items() if key not in APART}
    content["checkpoint"] = content["checkpoint"] and Path(content["checkpoint"]).parent.name
    for section, names in HARMLESS.items():
        content[section] = {key: value for key, value in content[section].items() if key not in names}
    if content["train"]["keep"] == "last":  # else they decide which weights are kept
        content["train"] = {key: value for key, value in content["train"].items() if key not in VALIDATION}
    content["batching"].pop("seed", None)
    for part in (content, content["evaluate"], content["datastore"]):
        if part.get("dataset"):
            part["dataset"] = {key: value for key, value in part["dataset"].items() if key not in PLACES}
    text = json.dumps(content, sort_keys=True)
    if packaged := content["model"].get("hub"):  # wherever the folder lies that was made of it
        text = text.replace(json.dumps(content["model"]["folder"]), json.dumps(packaged))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_published_text(run: dict[str, Any]) -> bool:
    """No split of the run's texts has another count than the published one."""
    notes = [*run["dataset"].get("notes", []), *run.get("evaluated", {}).get("notes", [])]
    return not any("are published" in note for note in notes)


def composed(*overrides: str) -> DictConfig:
    """Return the configuration of a command line."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", [*overrides])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides])


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


def results_in(places: list[Path]) -> list[dict[str, Any]]:
    """Every results.json below some folders, oldest first."""
    paths = sorted({path for place in places for path in place.rglob("results.json")}, key=lambda path: path.stat().st_mtime)
    return [read_run(path) for path in paths]


def read_run(path: Path) -> dict[str, Any]:
    """A results.json; UserError where it is truncated or none."""
    try:
        found = json.loads(path.read_text())
        if not {"name", "seed", "metrics"} <= found.keys():
            raise ValueError("no run")
    except (ValueError, AttributeError):
        raise UserError(f"{path} is truncated or no run's results: delete it and run its experiment again") from None
    return found


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
    write_aside(path, page(sorted(cells, key=lambda cell: order(cell.table))))
    states = [cell.state for cell in cells]
    print(f"ledger: {path}: " + ", ".join(f"{states.count(state)} {state}" for state in STATES))
    return path


def order(table: str) -> tuple[bool, int, str]:
    """TRIME's tables by number, then Attendre's."""
    digits = "".join(character for character in table if character.isdigit())
    return table.startswith("Attendre"), int(digits or 99), table
