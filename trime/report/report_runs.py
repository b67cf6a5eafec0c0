"""Report several runs together: one table, picture and page, in a folder for each set of runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from omegaconf import DictConfig

from trime.common.io import write_atomically
from trime.errors import UserError
from trime.report.answers import answers_panels, answers_table, depth_panels, policies_table
from trime.report.canvas import save_panels
from trime.report.comparison import compare_picture, compare_runs, curves_panels, joined_table, policies_panels
from trime.report.figures import configured_figures
from trime.report.groups import split_by, split_by_mixture
from trime.report.page import Page, Section, commands_section, picture_sections, place_of, write_page
from trime.report.results import distinct_runs, keep_results
from trime.report.run_result import AnsweringRun, RunResult, ScoredRun, scored_runs
from trime.report.tables import markdown, to_csv
from trime.report.terminal import answers_lines, answers_verdict, ending

POLICIES_NOTE = (
    "Share of questions answered, %, with Wilson's 95 % interval; which answers count is answering.counts of each run."
)
MANY_RUNS = 12  # their table is folded under its heading
LATEST = "latest"  # the name of a link to the latest report
DEPTH_HEIGHT = 2.8  # inches of a panel by depth and length


def report_several(config: DictConfig, runs: Sequence[RunResult], command: str | None = None) -> None:
    """Write table (Markdown and CSV), picture and page of some runs, and copy their results to ``report.keep``.

    ``command`` is the command line that asked for the report.
    """
    runs = distinct_runs(runs)
    folder = report_folder(Path(config.paths.outputs).expanduser() / "reports", config.report.name, runs)
    with writing_report(folder):
        if answering := [run for run in runs if isinstance(run, AnsweringRun)]:
            report_answering(answering, folder, command)
        models = scored_runs(runs)
        if models:
            report_models(models, config.report, folder, command)
    if config.report.keep:
        keep_results(runs, Path(config.report.keep).expanduser())


def report_folder(reports: Path, name: str, runs: Sequence[RunResult]) -> Path:
    """Return the folder of a report below ``reports``: its name, and a hash of the runs that it compares."""
    # The same runs in another order are the same report, and replace it.
    identities = sorted(str((run.name, run.seed, run.config_hash, run.title)) for run in runs)
    return reports / f"{name}-{hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:6]}"


@contextmanager
def writing_report(folder: Path) -> Iterator[None]:
    """Afterwards delete the files of an earlier report that were not written again, and link the folder as the latest."""
    folder.mkdir(parents=True, exist_ok=True)
    # Old files go only when the new ones are written: a report that fails deletes nothing.
    earlier = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    yield
    for path, written in earlier.items():
        with suppress(FileNotFoundError):  # another process may report the same runs
            if path.stat().st_mtime_ns == written:
                path.unlink()
    with suppress(OSError):  # not every file system has links
        link = folder.with_name(f".{LATEST}-{uuid4().hex}")
        link.symlink_to(folder.name)
        os.replace(link, folder.with_name(LATEST))


def check_report(config: DictConfig) -> None:
    """Raise UserError at a setting of a report that would fail when the runs are finished."""
    if config.report.keep and Path(config.report.keep).expanduser().is_file():
        raise UserError(f"report.keep={config.report.keep} is a file: name a folder")


def run_facts(runs: Sequence[RunResult]) -> list[str]:
    commits = sorted({str(run.commit)[:12] for run in runs})
    return [f"{len(runs)} runs", f"commit {', '.join(commits)}"]


def report_answering(runs: list[AnsweringRun], folder: Path, command: str | None) -> None:
    """Write tables, pictures and page of question-answering runs, all of them and by policy; print table and verdict."""
    table, policies, panels, depths = answers_table(runs), policies_table(runs), answers_panels(runs), depth_panels(runs)
    write_atomically(folder / "answers.md", markdown(*table))
    write_atomically(folder / "answers.csv", to_csv(*table))
    if len(policies.header) > 2 or len(policies.lines) > 1:
        text = f"{markdown(*policies)}\n{POLICIES_NOTE}\n"
        write_atomically(folder / "policies.md", text)
    if panels:
        save_panels(panels, folder / "policies.png")
    if depths:
        save_panels(depths, folder / "depth.png", height=DEPTH_HEIGHT)
    sections = [
        Section("Eviction policies", POLICIES_NOTE, [policies]),
        *picture_sections("By memory size", panels),
        *picture_sections("By depth and length", depths),
        Section("Runs", "The best run comes first.", [table], folded=len(runs) > MANY_RUNS),
        commands_section(runs, command),
    ]
    page = write_page(Page(folder.name, run_facts(runs), sections, ["answers.csv"]), folder / "answers.html")
    print(ending(answers_verdict(runs), answers_lines(runs), (), place_of(page)))


def report_models(runs: list[ScoredRun], settings: DictConfig, folder: Path, command: str | None) -> None:
    """Write table, pictures and page of language models and translations, by text; print tables and verdicts."""
    figures = configured_figures(settings.figures)
    texts = split_by(split_by_mixture(runs), lambda run: run.text)
    by_name = sorted(texts, key=lambda of_text: tuple(map(str, of_text[0].text)))
    comparisons = [compare_runs(of_text, settings) for of_text in by_name]
    groups = [group for comparison in comparisons for group in comparison.groups]
    names = {group.name for group in groups} | {group.policy for group in groups if group.policy}
    if len(groups) > 1 and (against := settings.against) not in names:
        print(f"report: no run is named {against}, so none is compared with it: set report.against={'|'.join(sorted(names))}")
    text = "\n".join(comparison.markdown(titled=len(comparisons) > 1) for comparison in comparisons)
    write_atomically(folder / "table.md", text)
    write_atomically(folder / "table.csv", to_csv(*joined_table(comparisons)))
    if orders := [f"{comparison.title}:\n\n{markdown(*comparison.order)}" for comparison in comparisons if comparison.verdicts]:
        write_atomically(folder / "order.md", "\n".join(orders))
    compare_picture([comparison.groups for comparison in comparisons], folder / "picture.png")
    if panels := [panel for comparison in comparisons for panel in curves_panels(comparison.runs)]:
        save_panels(panels, folder / "memory_size.png")
    if panels := [panel for comparison in comparisons for panel in policies_panels(comparison.groups)]:
        save_panels(panels, folder / "policies.png")
    for name, figure in figures.items():
        if panels := [panel for comparison in comparisons for panel in figure.comparison_panels(comparison.runs)]:
            save_panels(panels, folder / f"{name}.png", folder.name)
    sections = [section for comparison in comparisons for section in comparison.sections(figures)]
    content = Page(folder.name, run_facts(runs), [*sections, commands_section(runs, command)], ["table.csv", "order.md"])
    page = write_page(content, folder / "page.html")
    titles = [f"{comparison.title}:\n\n" * (len(comparisons) > 1) for comparison in comparisons]
    lines = "\n".join(title + comparison.lines for title, comparison in zip(titles, comparisons, strict=True))
    verdicts = "\n".join(comparison.verdict for comparison in comparisons)
    # The page explains the columns, and a note that several texts share is said once.
    notes = dict.fromkeys(note for comparison in comparisons for note in [*comparison.text_notes, comparison.verdicts] if note)
    print(ending(verdicts, lines, [*notes], place_of(page)))
