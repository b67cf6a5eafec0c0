"""report: write results.json, table, pictures and page of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trime.common.io import copy_file, plain, write_atomically
from trime.config.paths import make_absolute
from trime.lab.provenance import provenance
from trime.lab.stage import RunOutcome, Stage
from trime.lab.sweep import runs_of_sweep
from trime.lab.tracking import log_once
from trime.report import tables
from trime.report.answers import answers_table
from trime.report.canvas import save_panels
from trime.report.figures import configured_figures
from trime.report.page import Page, Section, commands_section, picture_sections, place_of, sample_sections, write_page
from trime.report.passages import Sample
from trime.report.results import write_results
from trime.report.run_result import AnsweringRun, AnswerRow, ScoredRun
from trime.report.tables import Table
from trime.report.terminal import answers_lines, answers_verdict, ending, run_lines, run_result, run_verdict
from trime.stages.analysis.run_analysis import TOKENS
from trime.stages.collect import collect_results, keep_provenance, made_from
from trime.stages.evaluate import policy_name
from trime.stages.graph import Graph
from trime.stages.samples.text_samples import OutOfTimeError, samples_of

log = logging.getLogger(__name__)


def report_run(graph: Graph) -> RunOutcome:
    """Write results.json, config.yaml, metrics.csv, table, pictures and page of a run, print table and verdict, and log the
    report once to each logger; return the run's loss and folder.
    """
    config, folder = graph.config, graph.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    sampled = samples_of(graph)
    # The samples' artefact is of the run before it is drawn, so that pruning does not take what was drawn so far.
    run = keep_provenance(folder / "results.json", collect_results(graph, [sampled] if sampled else []))
    # Written before anything slow or fragile, such as pictures: they are the result.
    kept = OmegaConf.merge(config, {"trainer": {"precision": graph.hardware.precision}})  # auto depends on the machine
    place = Path(config.paths.outputs).expanduser()
    if place.is_absolute() or ".." in place.parts:  # nobody could tell from the run's place where the command was started
        make_absolute(kept, Path.cwd())  # type: ignore[arg-type]
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(kept, resolve=True))
    write_results(folder / "results.json", run)
    if config.logger.history:
        copy_file(graph.model.path() / "metrics.csv", folder / "metrics.csv")
    if graph.per_token:
        copy_file(graph.per_token.path() / TOKENS, folder / TOKENS)
    table, verdict, is_alone = tables.run_table(run), run_verdict(run), runs_of_sweep() < 2
    sections = result_sections(run, folder, table, verdict)
    if is_alone:  # what follows decorates the results, and may take longer than they did
        print(f"results: {folder / 'results.json'}", flush=True)
    samples: list[Sample] = []
    if sampled:
        try:
            sampled.make()
            drawn = sampled.summary()
        except OutOfTimeError as stopped:
            log.info(f"report: {stopped}")
            drawn = stopped.samples
        samples = [Sample(**sample) for sample in drawn]
    headline = f"{run.name} on {run.title}, seed {run.seed}"
    figures = configured_figures(config.report.figures)
    pictures: dict[str, Path] = {}
    for name, figure in figures.items():
        if panels := figure.panels(run, folder / "metrics.csv"):
            pictures[name] = save_panels(panels, folder / f"{name}.png", headline, figure.height(run))
            sections += picture_sections(figure.title, panels, figure.note)
    sections += [*graph.own_sections(run), *sample_sections(samples, graph.samples_title)]
    files = ["results.json", "config.yaml", "table.csv", "metrics.csv", TOKENS, "log.txt"]
    facts = [
        tables.text_facts(run),
        f"seed {run.seed}",
        *([f"{run.parameters:,} parameters"] if run.parameters else []),
        *([f"{run.train.updates:,} updates"] if run.train.updates else []),
        *([] if run.is_trained else ["not trained"]),
        f"{run.hardware['gpu'] or run.hardware['cpu']}, {run.hardware['cores']} cores",
        f"commit {(run.commit or 'unknown')[:12]}",
    ]
    page = write_page(Page(run.name, facts, [*sections, commands_section([run])], files), folder / "page.html")
    if is_alone:
        print(ending(verdict, run_lines(run, table), tables.text_notes(run), place_of(page)), flush=True)
    else:  # a sweep ends with a table of all
        print(f"{run_result(run)}, {page}", flush=True)
    # After all files: what is logged is what the page shows.
    log_once(lambda: graph.loggers, plain(config.logger), folder, run, samples, pictures)
    return RunOutcome(run.dev.loss, (folder,))


def result_sections(run: ScoredRun, folder: Path, table: Table, verdict: str) -> list[Section]:
    """Write the tables of a run, that of its rows with its notes; return the sections of its rows and its memories."""
    notes = notes_of(run)
    text = "\n".join([tables.markdown(*table), *(f"{note}\n" for note in notes)])
    write_atomically(folder / "table.md", text)
    write_atomically(folder / "table.csv", tables.to_csv(*table))
    note = f"{verdict}\n{tables.common_facts(run)}"
    sections = [Section("Results", note, [tables.without_common(table)], footnotes=notes, emphasise_last=True)]
    further = {"analysis.md": tables.analysis_text(run)} if run.analysis else {}
    if run.subsets:
        title, memories = tables.memories_table(run, run.subsets)
        further = {"memories.md": f"{title}:\n\n{tables.markdown(*memories)}\n{tables.MEMORIES_NOTE}\n"} | further
        sections.append(Section(title, tables.MEMORIES_NOTE, [memories]))
    for name, content in further.items():
        write_atomically(folder / name, content)
    return sections


def notes_of(run: ScoredRun) -> list[str]:
    """Return what is to be known of a run's text and rows."""
    notes = {
        tables.MIXTURES_NOTE: any("⊕" in row.memories for row in run.metrics["test"]),
        tables.FITTED_NOTE: run.is_fitted,
        tables.EDGE_NOTE: any(row.at_grid_edge for row in run.metrics["valid"]),
    }
    return [*tables.text_notes(run), *(note for note, applies in notes.items() if applies)]


def report_answers(graph: Graph) -> RunOutcome:
    """Write results.json, table, picture and page of an answering run, and print table and verdict."""
    config, folder = graph.config, graph.answers_folder
    folder.mkdir(parents=True, exist_ok=True)
    run = collect_answers(graph)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", run)
    table = answers_table([run])
    write_atomically(folder / "table.csv", tables.to_csv(*table))
    note = "In brackets Wilson's 95 % intervals over questions. M and N are entries and waiting queries of each layer's memory."
    sections = [Section("Results", note, [table])]
    facts = [f"seed {run.seed}", f"split {config.answering.split}", f"commit {(run.commit or 'unknown')[:12]}"]
    content = Page(run.name, facts, [*sections, commands_section([run])], ["results.json", "config.yaml", "table.csv"])
    page = write_page(content, folder / "page.html")
    verdict = answers_verdict([run])
    whole = ending(verdict, answers_lines([run]), (), place_of(page))
    print(f"{verdict} {page}" if runs_of_sweep() > 1 else whole, flush=True)
    return RunOutcome(folders=(folder,))


def collect_answers(graph: Graph) -> AnsweringRun:
    """Return the results of a model that answered questions."""
    config = graph.config
    settings: dict[str, Any] = graph.answer.reading() | {
        "eviction": policy_name(plain(config.eviction)),
        "max_prompt_tokens": config.answering.max_prompt_tokens,
    }
    names = ("split", "counts", "order", "chat_template", "examples")
    return AnsweringRun(
        **provenance(config),
        questions=plain(config.questions),
        questions_text=graph.answer.files[0],
        answering={name: plain(config.answering[name]) for name in names},
        model=config.model.name or str(graph.small_model.path()),  # type: ignore[union-attr]
        small_model=graph.small_model.recipe() if graph.small_model else None,
        metrics={config.answering.split: [AnswerRow(**(graph.answer.summary() | settings))]},
        made_from=made_from(graph, "train_small", "answer"),
    )


REPORT = Stage("report", report=report_run, has_log=True)
ANSWER = Stage("answer", lambda graph: [graph.answer], report=report_answers, has_log=True)
