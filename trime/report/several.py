"""Report several runs together: one table, picture and page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.errors import UserError
from trime.io import plain, write_atomically
from trime.report.answers import answers_panels, answers_picture, answers_table, policies_table
from trime.report.command_lines import without_paths
from trime.report.compare import PublishedResults, compare_table, order_table
from trime.report.figures.base import Figure
from trime.report.figures.several import compare_picture, curves_picture, policies_picture, several_panels
from trime.report.frontier import report_frontier
from trime.report.groups import group_runs, is_fitted, split_by_mixture
from trime.report.page import Page, Section, Table, commands_section, picture_sections, write_page
from trime.report.results import write_results
from trime.report.tables import EDGE, EDGE_NOTE, FITTED_NOTE, Lines, evaluated_text, markdown, to_csv


def report_several(config: DictConfig, runs: list[dict[str, Any]]) -> None:
    """Write table (Markdown and CSV), picture and page of some runs."""
    folder = Path(config.paths.outputs) / "reports" / config.report.name
    folder.mkdir(parents=True, exist_ok=True)
    if answering := [run for run in runs if "questions" in run]:
        report_answering(answering, folder)
    if swept := [run for run in runs if run.get("subsets", {}).get("selection") == "all"]:
        report_frontier(swept, config.frontier, folder)
    models = [run for run in runs if "questions" not in run]
    if len(models) > len(swept):
        figures = instantiate(config.report.figures, _convert_="all")
        report_models(models, config.report.against, plain(config.report.published) or {}, figures, folder)
    if config.report.keep:
        keep_results(runs, Path(config.report.keep))


def check_keep(config: DictConfig) -> None:
    """Raise UserError if ``report.keep`` is no folder."""
    if config.report.keep and Path(config.report.keep).is_file():
        raise UserError(f"report.keep={config.report.keep} is a file: name a folder")


def report_answering(runs: list[dict[str, Any]], folder: Path) -> None:
    """Write and print table, pictures and page of question-answering runs."""
    header, lines = answers_table(runs)
    write_atomically(folder / "answers.md", markdown(header, lines))
    write_atomically(folder / "answers.csv", to_csv(header, lines))
    print(f"\n{markdown(header, lines)}\ntable: {folder / 'answers.md'}, {folder / 'answers.csv'}")
    report_policies(runs, folder)
    sections = [
        Section("Runs", tables=[Table(header, lines)]),
        Section("Eviction policies", tables=[Table(*policies_table(runs))]),
        *picture_sections("Exact match by memory size", answers_panels(runs)),
        commands_section(runs),
    ]
    print(f"page: {write_page(Page(folder.name, run_facts(runs), sections), folder / 'answers.html')}")


def keep_results(runs: list[dict[str, Any]], folder: Path) -> None:
    """Copy the results of runs into one folder, without paths of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        results = {key: value for key, value in run.items() if key != "artefacts"}
        results["command"] = without_paths(run.get("command"))
        text = "" if "questions" in run else evaluated_text(run)[1][:4]  # config_hash does not depend on dataset.path
        name = f"{run['name']}-seed{run['seed']}-{str(run.get('config_hash'))[:6]}{text}.json"
        write_results(folder / name, results)
    print(f"kept {len(runs)} results in {folder}")


def run_facts(runs: list[dict[str, Any]]) -> list[str]:
    """Return the number of runs and the commits of their code."""
    commits = sorted({str(run["commit"])[:12] for run in runs})
    return [f"{len(runs)} runs", f"commit {', '.join(commits)}"]


def report_policies(runs: list[dict[str, Any]], folder: Path) -> None:
    """Write and print exact match by policy and memory size, if there are several of either."""
    header, lines = policies_table(runs)
    if len(header) > 5 or len(lines) > 1:
        write_atomically(folder / "policies.md", markdown(header, lines))
        print(f"\n{markdown(header, lines)}\npicture: {answers_picture(runs, folder / 'policies.png')}")


def report_models(
    runs: list[dict[str, Any]], against: str, published: PublishedResults, figures: dict[str, Figure], folder: Path
) -> None:
    """Write and print table, pictures and page of language models, with a comparison of their order with that of the papers."""
    groups = group_runs(split_by_mixture(runs))
    names = {group.first["name"] for group in groups} | {group.policy for group in groups if group.policy}
    if against not in names:
        print(f"report: no run is named {against}, so none is compared with it: set report.against={'|'.join(sorted(names))}")
    header, lines = compare_table(groups, against, published)
    order = order_table(groups, published)
    ordered = f"\n{markdown(*order)}\n{verdict_summary(order[1])}\n" if order[1] else ""
    write_atomically(folder / "table.csv", to_csv(header, lines))
    picture = compare_picture(groups, folder / "picture.png")
    text = markdown(header, lines) + ordered
    write_atomically(folder / "table.md", text)
    edges = EDGE_NOTE if EDGE in text else ""
    text += f"\n{FITTED_NOTE}\n" * any(map(is_fitted, runs))
    print(f"\n{text}\n* published results, dev / test or test alone: compare their order" + f"\n{edges}" * bool(edges))
    print(f"table: {folder / 'table.md'}, {folder / 'table.csv'}\npicture: {picture}")
    if any(run.get("analysis", {}).get("valid", {}).get("by_memory_size") for run in runs):
        print(f"sizes of long memory: {curves_picture(runs, folder / 'memory_size.png')}")
    if len({group.row.get("eviction") for group in groups} - {None}) > 1:
        print(f"policies: {policies_picture(groups, folder / 'policies.png')}")
    compared = {name: panels for name, figure in figures.items() if (panels := figure.comparison_panels(runs))}
    for name, panels in compared.items():
        print(f"{name}: {figures[name].save(panels, folder.name, folder / f'{name}.png')}")
    units = sorted({group.row.get("bootstrap_unit", "documents") for group in groups})
    note = (
        f"The worst run comes first. Differences to {against} are paired, with a 95 % interval by bootstrap over seeds and "
        f"{' or '.join(units)}; no difference is shown if the interval contains zero. Columns with * hold published results, "
        f"dev / test or test alone. {f'{FITTED_NOTE} ' * any(map(is_fitted, runs))}{edges}"
    )
    sections = [
        Section("Runs", note, [Table(header, lines)]),
        *([Section("Order of the papers", verdict_summary(order[1]), [Table(*order)])] if order[1] else []),
        *picture_sections("Pictures", several_panels(groups, runs)),
        *(section for name, panels in compared.items() for section in picture_sections(figures[name].title, panels)),
        commands_section(runs),
    ]
    print(f"page: {write_page(Page(folder.name, run_facts(runs), sections), folder / 'page.html')}")


def verdict_summary(lines: Lines) -> str:
    """Return a sentence that counts the verdicts of an order table."""
    counts = Counter(line[-1] for line in lines)
    phrases = {
        "agrees": "agree with the paper in sign",
        "disagrees": "disagree",
        "no difference shown": "show no difference",
        "no interval": "have no interval",
    }
    return f"Of {len(lines)} pairs, {', '.join(f'{counts[name]} {words}' for name, words in phrases.items() if counts[name])}."
