"""Report several runs together: one table, picture and page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.errors import UserError
from trime.io import checksum_of, plain, write_atomically
from trime.report.answers import answers_table
from trime.report.figures.base import configured_figures
from trime.report.figures.canvas import save_panels
from trime.report.figures.comparison import compare_picture, curves_panels, policies_panels
from trime.report.folder import report_folder, writing_report
from trime.report.frontier import report_frontier
from trime.report.groups import Group, split_by_mixture
from trime.report.page import Page, Section, Table, commands_section, picture_sections, write_page
from trime.report.policies import answers_panels, depth_panels, policies_table
from trime.report.results import distinct_runs, portable, read_run, write_results
from trime.report.tables import markdown, to_csv
from trime.report.text_comparison import compare_runs, joined_table
from trime.report.texts import evaluated_text, group_by_text, other_texts

POLICIES_NOTE = (
    "Share of questions answered, %, with Wilson's 95 % interval; which answers count is answering.counts of each run."
)
NAME = re.compile(r"[^./\0][^/\0]*")  # of a folder
MANY_RUNS = 12  # of which the table is shown when its heading is selected
DEPTH_HEIGHT = 2.8  # inches of a panel by depth and length


def report_several(config: DictConfig, runs: list[dict[str, Any]], command: str | None = None) -> None:
    """Write table (Markdown and CSV), picture and page of some runs, and copy their results to ``report.keep``.

    ``command`` is the command line that asked for the report.
    """
    runs = distinct_runs(runs)
    folder = report_folder(Path(config.paths.outputs).expanduser() / "reports", config.report.name, runs)
    with writing_report(folder):
        if answering := [run for run in runs if "questions" in run]:
            report_answering(answering, folder, command)
        if swept := [run for run in runs if run.get("subsets", {}).get("selection") == "all"]:
            report_frontier(swept, config.frontier, folder, command)
        models = [run for run in runs if "questions" not in run]
        if len(models) > len(swept):
            report_models(models, config.report, folder, command)
    if config.report.keep:
        keep_results(runs, Path(config.report.keep).expanduser())


def check_report(config: DictConfig) -> None:
    """Raise UserError at settings of a report that would fail when the runs are finished."""
    report = config.report
    if not NAME.fullmatch(report.name):
        raise UserError(f"report.name={report.name}: it must be a name, not a path")
    if report.keep and Path(report.keep).expanduser().is_file():
        raise UserError(f"report.keep={report.keep} is a file: name a folder")
    for key, given in (("figures", report.figures), ("published", report.published or {})):
        if not isinstance(plain(given), dict):
            raise UserError(f"report.{key}={given}: it must be a mapping, as in conf/config.yaml and conf/table")


def report_answering(runs: list[dict[str, Any]], folder: Path, command: str | None) -> None:
    """Write and print table, pictures and page of question-answering runs."""
    header, lines = answers_table(runs)
    write_atomically(folder / "answers.md", markdown(header, lines))
    write_atomically(folder / "answers.csv", to_csv(header, lines))
    print(f"\n{markdown(header, lines)}\ntable: {folder / 'answers.md'}, {folder / 'answers.csv'}")
    sections = [
        *report_policies(runs, folder),
        Section("Runs", "The best run comes first.", [Table(header, lines)], folded=len(runs) > MANY_RUNS),
        commands_section(runs, command),
    ]
    print(f"page: {write_page(Page(folder.name, run_facts(runs), sections, ['answers.csv']), folder / 'answers.html')}")


def keep_results(runs: list[dict[str, Any]], folder: Path) -> None:
    """Copy the results of runs into one folder, without paths of this machine; a run that was made again replaces itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in map(portable, runs):
        text = "" if "questions" in run else evaluated_text(run).fingerprint[:4]  # config_hash does not depend on dataset.path
        name = f"{run['name']}-seed{run['seed']}-{str(run.get('config_hash'))[:6]}{text}"
        file = folder / f"{name}.json"
        if file.is_file() and texts_differ(read_run(file), run):
            file = folder / f"{name}-{checksum_of(hidden_texts(run))[:4]}.json"
        write_results(file, run)
    print(f"kept {len(runs)} results in {folder}")


def hidden_texts(run: dict[str, Any]) -> dict[str, str]:
    """Return the fingerprints of texts that a file's name does not tell: a model's, a datastore's, those of questions."""
    return {what: text for what, (_, text) in other_texts(run).items()} | {"questions": run.get("questions_text", "")}


def texts_differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two runs are known to have read different texts."""
    first, second = hidden_texts(one), hidden_texts(other)
    return any(first[what] and second[what] and first[what] != second[what] for what in first.keys() & second.keys())


def run_facts(runs: list[dict[str, Any]]) -> list[str]:
    """Return the number of runs and the commits of their code."""
    commits = sorted({str(run["commit"])[:12] for run in runs})
    return [f"{len(runs)} runs", f"commit {', '.join(commits)}"]


def report_policies(runs: list[dict[str, Any]], folder: Path) -> list[Section]:
    """Write and print results by policy, memory size, length and depth, if there are several; return their sections."""
    (header, lines), by_size, by_depth = policies_table(runs), answers_panels(runs), depth_panels(runs)
    if len(header) > 2 or len(lines) > 1:
        write_atomically(folder / "policies.md", f"{markdown(header, lines)}\n{POLICIES_NOTE}\n")
        print(f"\n{markdown(header, lines)}\n{POLICIES_NOTE}\n")
    if by_size:
        print(f"by memory size: {save_panels(by_size, folder / 'policies.png')}")
    if by_depth:
        print(f"by depth and length: {save_panels(by_depth, folder / 'depth.png', height=DEPTH_HEIGHT)}")
    return [
        Section("Eviction policies", POLICIES_NOTE, [Table(header, lines)]),
        *picture_sections("By memory size", by_size),
        *picture_sections("By depth and length", by_depth),
    ]


def report_models(runs: list[dict[str, Any]], settings: DictConfig, folder: Path, command: str | None) -> None:
    """Write and print table, pictures and page of language models and translations, each text in a section of its own."""
    figures = configured_figures(settings.figures)
    texts = group_by_text(split_by_mixture(runs))
    comparisons = [compare_runs(of_text, settings) for of_text in texts.values()]
    warn_of_baseline([group for comparison in comparisons for group in comparison.groups], settings.against)
    text = "\n".join(comparison.markdown(titled=len(comparisons) > 1) for comparison in comparisons)
    write_atomically(folder / "table.md", text)
    write_atomically(folder / "table.csv", to_csv(*joined_table(comparisons)))
    print(f"\n{text}\ntable: {folder / 'table.md'}, {folder / 'table.csv'}")
    if orders := [f"{comparison.title}:\n\n{markdown(*comparison.order)}" for comparison in comparisons if comparison.order[1]]:
        write_atomically(folder / "order.md", "\n".join(orders))
        print(f"order of the papers: {folder / 'order.md'}")
    print(f"picture: {compare_picture([comparison.groups for comparison in comparisons], folder / 'picture.png')}")
    if panels := [panel for comparison in comparisons for panel in curves_panels(comparison.runs)]:
        print(f"sizes of long memory: {save_panels(panels, folder / 'memory_size.png')}")
    if panels := [panel for comparison in comparisons for panel in policies_panels(comparison.groups)]:
        print(f"policies: {save_panels(panels, folder / 'policies.png')}")
    for name, figure in figures.items():
        if panels := [panel for comparison in comparisons for panel in figure.comparison_panels(comparison.runs)]:
            print(f"{name}: {figure.save(panels, folder.name, folder / f'{name}.png')}")
    sections = [section for comparison in comparisons for section in comparison.sections(figures)]
    page = Page(folder.name, run_facts(runs), [*sections, commands_section(runs, command)], ["table.csv", "order.md"])
    print(f"page: {write_page(page, folder / 'page.html')}")


def warn_of_baseline(groups: list[Group], against: str) -> None:
    """Print that no run of several is the baseline, if none is."""
    names = {group.first["name"] for group in groups} | {group.policy for group in groups if group.policy}
    if len(groups) > 1 and against not in names:
        print(f"report: no run is named {against}, so none is compared with it: set report.against={'|'.join(sorted(names))}")
