"""One table, picture and page of several runs."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.io import compact_json, plain, write_atomically
from trime.report.answers import answers_panels, answers_picture, answers_table, policies_grid
from trime.report.command_lines import without_places
from trime.report.compare import Published, compare_table, ordering
from trime.report.figures.several import compare_picture, curves_picture, policies_picture, several_panels
from trime.report.frontier import report_frontier
from trime.report.groups import by_mixture, grouped, is_fitted
from trime.report.page import Page, Section, Table, commands, pictured, write_page
from trime.report.results import read_run
from trime.report.tables import EDGE, EDGE_NOTE, FITTED_NOTE, Lines, csv_of, evaluated, markdown
from trime.types import UserError


def report_several(config: DictConfig, patterns: list[str]) -> None:
    """One table (Markdown and CSV), picture and page of the runs that the patterns find."""
    if config.report.keep and Path(config.report.keep).is_file():
        raise UserError(f"report.keep={config.report.keep} is a file: name a folder")
    runs = found_runs(patterns)
    if not runs:
        raise UserError(f"report.runs={', '.join(patterns)} finds no results.json: name folders of finished runs")
    folder = Path(config.paths.outputs) / "reports" / config.report.name
    folder.mkdir(parents=True, exist_ok=True)
    if answering := [run for run in runs if "questions" in run]:
        header, lines = answers_table(answering)
        write_atomically(folder / "answers.md", markdown(header, lines))
        write_atomically(folder / "answers.csv", csv_of(header, lines))
        print(f"\n{markdown(header, lines)}\ntable: {folder / 'answers.md'}, {folder / 'answers.csv'}")
        report_policies(answering, folder)
        sections = [
            Section("Runs", tables=[Table(header, lines)]),
            Section("Policies", tables=[Table(*policies_grid(answering))]),
        ]
        sections += [*pictured("Exact match over memory size", answers_panels(answering)), commands(answering)]
        print(f"page: {write_page(Page(config.report.name, counted(answering), sections), folder / 'answers.html')}")
    if swept := [run for run in runs if run.get("subsets", {}).get("which") == "all"]:
        report_frontier(swept, config.frontier, folder)
    models = [run for run in runs if "questions" not in run]
    if len(models) > len(swept):
        report_models(models, config.report.against, plain(config.report.published) or {}, folder)
    if config.report.keep:
        kept(runs, Path(config.report.keep))


def kept(runs: list[dict[str, Any]], folder: Path) -> None:
    """Their results.json side by side, without where things lie on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        own = {key: value for key, value in run.items() if key != "artefacts"}
        own["command"] = without_places(run.get("command"))
        text = "" if "questions" in run else evaluated(run)[1][:4]  # the hash knows no paths
        name = f"{run['name']}-seed{run['seed']}-{str(run.get('config_hash'))[:6]}{text}.json"
        write_atomically(folder / name, compact_json(own))
    print(f"kept: {len(runs)} results in {folder}")


def counted(runs: list[dict[str, Any]]) -> list[str]:
    """How many runs, of which code."""
    commits = sorted({str(run["commit"])[:12] for run in runs})
    return [f"{len(runs)} runs", f"commit {', '.join(commits)}"]


def report_policies(runs: list[dict[str, Any]], folder: Path) -> None:
    """Exact match by policy over sizes, where there are several."""
    header, lines = policies_grid(runs)
    if len(header) > 5 or len(lines) > 1:
        write_atomically(folder / "policies.md", markdown(header, lines))
        print(f"\n{markdown(header, lines)}\npicture: {answers_picture(runs, folder / 'policies.png')}")


def report_models(runs: list[dict[str, Any]], against: str, published: Published, folder: Path) -> None:
    """Table and pictures of language models, and where they stand in the papers' order."""
    groups = grouped(by_mixture(runs))
    names = {group.first["name"] for group in groups} | {group.policy for group in groups if group.policy}
    if against not in names:
        print(f"report: no run is named {against}, so none is compared: choose report.against={'|'.join(sorted(names))}")
    header, lines = compare_table(groups, against, published)
    order = ordering(groups, published)
    ordered = f"\n{markdown(*order)}\n{verdicts(order[1])}\n" if order[1] else ""
    write_atomically(folder / "table.csv", csv_of(header, lines))
    picture = compare_picture(groups, folder / "picture.png")
    text = markdown(header, lines) + ordered
    write_atomically(folder / "table.md", text)
    edges = EDGE_NOTE if EDGE in text else ""
    text += f"\n{FITTED_NOTE}\n" * any(map(is_fitted, runs))
    print(f"\n{text}\n* published dev / test (one figure: test), for the order of rows" + f"\n{edges}" * bool(edges))
    print(f"table: {folder / 'table.md'}, {folder / 'table.csv'}\npicture: {picture}")
    if any(run.get("analysis", {}).get("dev", {}).get("by_memory_size") for run in runs):
        print(f"sizes of long memory: {curves_picture(runs, folder / 'memory_size.png')}")
    if len({group.row.get("eviction") for group in groups} - {None}) > 1:
        print(f"policies: {policies_picture(groups, folder / 'policies.png')}")
    drawn = sorted({group.row.get("drawn", "documents") for group in groups})
    note = (
        f"The worst first. Differences to {against} are paired, with a 95 % interval by bootstrap over seeds and "
        f"{' or '.join(drawn)}; "
        "no difference is shown where zero lies inside. Columns with * hold published figures, dev / test (one figure: test). "
        f"{f'{FITTED_NOTE}. ' * any(map(is_fitted, runs))}{edges}"
    )
    sections = [
        Section("Runs", note, [Table(header, lines)]),
        *([Section("The papers' order", verdicts(order[1]), [Table(*order)])] if order[1] else []),
        *pictured("Pictures", several_panels(groups, runs)),
        commands(runs),
    ]
    print(f"page: {write_page(Page(folder.name, counted(runs), sections), folder / 'page.html')}")


def verdicts(lines: Lines) -> str:
    """How many comparisons have the published sign."""
    counts = Counter(line[-1] for line in lines)
    said = {
        "agrees": "agree in sign",
        "disagrees": "disagree",
        "no difference shown": "show no difference",
        "no interval": "have no interval",
    }
    return (
        f"Of {len(lines)} comparisons {', '.join(f'{counts[name]} {words}' for name, words in said.items() if counts[name])}."
    )


def found_runs(patterns: list[str]) -> list[dict[str, Any]]:
    """The results.json files at, in or below what the patterns match, each once."""
    paths: set[Path] = set()
    for pattern in patterns:
        for place in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)):
            paths |= results_at(place)
    return [read_run(path) for path in sorted(path.resolve() for path in paths)]


def results_at(place: Path) -> set[Path]:
    """A file that is one, a run's, or those that were kept in a folder."""
    if not place.is_dir():
        return (
            {place}
            if place.name == "results.json" or (place.suffix == ".json" and place.parent.parent.name == "tables")
            else set()
        )
    return {place / "results.json"} if (place / "results.json").exists() else set()
