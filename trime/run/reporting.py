"""report: write results.json, table, pictures and page of a run."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from trime.inspection.answer_samples import AnswerSamples
from trime.inspection.drawing import OutOfTimeError
from trime.inspection.samples import Samples, samples_of
from trime.inspection.translation_samples import TranslationSamples
from trime.io import copy_file, plain, write_atomically, write_json
from trime.plan.language_model import Plan
from trime.plan.translation import TranslationPlan
from trime.report.answers import answers_table, judged, kept_panel, sample_note
from trime.report.figures.base import Figure, configured_figures
from trime.report.figures.canvas import Panel, save_panels
from trime.report.figures.comparison import replay_picture
from trime.report.figures.passages import save_passages
from trime.report.groups import is_fitted
from trime.report.memories import memories_section, memories_text
from trime.report.page import Page, Section, Table, commands_section, picture_sections, sample_sections, write_page
from trime.report.results import write_results
from trime.report.tables import EDGE_NOTE, FITTED_NOTE, analysis_text, applicable, markdown, replay_text, run_table, to_csv
from trime.report.texts import evaluated_text, is_trained, text_facts, text_notes
from trime.run.collect import collect_results, keep_provenance, made_from
from trime.run.provenance import provenance
from trime.stages.analysis.per_token import FILE
from trime.stages.evaluate import policy_name

log = logging.getLogger(__name__)

BASELINE_NOTE = (
    "The row vocabulary is this model without its memories, not a baseline: a model trained plainly does better without them. "
    "report.baseline=vanilla trains that one too, at the same budget, and compares."
)


class RunReport(NamedTuple):
    """What was reported of a run: its results, the samples on its page, and the file of each figure by the figure's name."""

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    figures: dict[str, Path]


def report_run(plan: Plan) -> RunReport:
    """Write results.json, config.yaml, metrics.csv, table, pictures and page of a run, and print the table and the paths."""
    config, folder = plan.config, plan.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    sampled = samples_of(plan)
    results = keep_provenance(folder / "results.json", collect_results(plan, [sampled] if sampled else []))
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    if config.logger.history:
        copy_file(plan.model.path() / "metrics.csv", folder / "metrics.csv")
    if plan.per_token:
        copy_file(plan.per_token.path() / FILE, folder / FILE)
    header, lines = run_table(results)
    table = "\n".join([markdown(header, lines), *(f"{note}\n" for note in [*text_notes(results), *run_footnotes(results)])])
    write_atomically(folder / "table.md", table)
    write_atomically(folder / "table.csv", to_csv(header, lines))
    if "subsets" in results:
        text = memories_text(results)
        write_atomically(folder / "memories.md", text)
        print(f"\n{text}")
    if "analysis" in results:
        text = analysis_text(results)
        write_atomically(folder / "analysis.md", text)
        print(f"\n{text}")
    print(f"\n{config.name}, seed {config.seed}, on {text_facts(results)}\n\n{table}")
    print(f"results: {folder / 'results.json'}", flush=True)
    samples = drawn_samples(sampled) if sampled else []
    figures = configured_figures(config.report.figures)
    headline = f"{results['name']} on {evaluated_text(results).title}, seed {results['seed']}"
    drawn = draw_figures(figures, results, folder, headline)
    if samples and figures:
        drawn["passages"] = save_passages(samples, headline, folder / "passages.png")
    translations = translations_section(plan, results) if isinstance(plan, TranslationPlan) else []
    examples = [*translations, *sample_sections(samples, "Translations" if translations else "Test text, scored")]
    shown = Table(header, lines, emphasise_last=True)
    page = write_page(run_page(results, shown, folder / "metrics.csv", [*figures.values()], examples), folder / "page.html")
    tokens = [("tokens", folder / FILE)] if plan.per_token else []
    for name, path in [*tokens, *drawn.items(), ("page", page)]:
        print(f"{name}: {path}")
    return RunReport(results, samples, drawn)


def drawn_samples(sampled: Samples | TranslationSamples) -> list[dict[str, Any]]:
    """Draw the samples of a run's page, which may take longer than its results; return those that were drawn in time."""
    try:
        sampled.make()
    except OutOfTimeError as stopped:
        log.info(f"report: {stopped}")
        return stopped.samples
    samples: list[dict[str, Any]] = sampled.summary()
    return samples


def draw_figures(figures: dict[str, Figure], results: dict[str, Any], folder: Path, headline: str) -> dict[str, Path]:
    """Draw every figure that has panels for a run into the run's folder; return the file of each by its name."""
    drawn = {}
    for name, figure in figures.items():
        if panels := figure.panels(results, folder / "metrics.csv"):
            drawn[name] = figure.save(panels, headline, folder / f"{name}.png", figure.height(results))
    return drawn


def translations_section(plan: TranslationPlan, results: dict[str, Any]) -> list[Section]:
    """Return a section of test sentences with their translations as a list, which is empty if none are to be shown."""
    count, rows = plan.config.report.samples.passages, [row["memories"] for row in results["metrics"]["test"]]
    examples = plan.evaluate.translations.examples(count) if count else []
    tables = [Table(["", "text"], [*map(list, zip(["source", "reference", *rows], texts, strict=True))]) for texts in examples]
    note = "Sentences spread over test: the source, its reference, and the translation by each row of the table."
    return [Section("Translations", note, tables)] if tables else []


def run_page(results: dict[str, Any], table: Table, history: Path, figures: list[Figure], examples: list[Section]) -> Page:
    """Return the page of a run: results, memories, figures, examples of its text and its command."""
    train, machine = results["train"], results["hardware"]
    facts = [
        text_facts(results),
        f"seed {results['seed']}",
        *([f"{results['parameters']:,} parameters"] if results["parameters"] else []),
        *([f"{train['updates']:,} updates"] if train.get("updates") else []),
        *([] if is_trained(results) else ["not trained"]),
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores",
        commit_fact(results),
    ]
    note = "The last row is the experiment's own. Temperatures, weights and sizes were tuned on dev; test was scored once."
    note = " ".join([note, *text_notes(results)])
    return Page(
        results["name"],
        facts,
        [
            Section("Results", note, [table], footnotes=run_footnotes(results)),
            *memories_section(results),
            *(
                section
                for figure in figures
                for section in picture_sections(figure.title, figure.panels(results, history), figure.note)
            ),
            *examples,
            commands_section([results]),
        ],
        ["results.json", "config.yaml", "table.csv", "metrics.csv", FILE, "log.txt"],
    )


def commit_fact(results: dict[str, Any]) -> str:
    """Return the commit of a run's code as pages name it."""
    return f"commit {(results['commit'] or 'unknown')[:12]}"


def run_footnotes(results: dict[str, Any]) -> list[str]:
    """Return how the rows and marks of a run's table are to be read."""
    has_memories, rows = len(results["metrics"]["test"]) > 1, results["metrics"]["valid"]
    compared = "report.baseline=" in (results["command"] or "")
    return applicable(
        {
            BASELINE_NOTE: results["trained_with_memory"] and has_memories and not compared,
            FITTED_NOTE: is_fitted(results),
            EDGE_NOTE: any(row.get("at_grid_edge") for row in rows),
        }
    )


def report_replay(plan: Plan) -> None:
    """Write and print the table and the picture of what every eviction policy retains."""
    folder, results = plan.run_folder, plan.replay.summary()
    folder.mkdir(parents=True, exist_ok=True)
    text = replay_text(results)
    write_json(folder / "replay.json", results)
    write_atomically(folder / "replay.md", text)
    print(f"\n{text}\nreplay: {replay_picture(results, folder / 'replay.png')}")


def report_answers(plan: Plan) -> Path:
    """Write results.json, table, picture and page of an answering run, and print its table; return the run's folder."""
    config, folder = plan.config, plan.answers_folder
    folder.mkdir(parents=True, exist_ok=True)
    row = plan.answer.summary() | plan.answer.reading()
    row |= {"eviction": policy_name(plain(config.eviction)), "max_prompt_tokens": config.answering.max_prompt_tokens}
    results = provenance(config) | {
        "questions": plain(config.questions),
        "questions_text": plan.answer.files[0],
        "answering": {
            name: plain(config.answering[name]) for name in ("split", "counts", "order", "chat_template", "examples")
        },
        "model": config.model.name or str(plan.small_model.path()),  # type: ignore[union-attr]
        "small_model": plan.small_model.recipe() if plan.small_model else None,
        "metrics": {config.answering.split: [row]},
        "made_from": made_from(plan, "train_small", "answer"),
    }
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    header, lines = answers_table([results])
    write_atomically(folder / "table.csv", to_csv(header, lines))
    print(f"\n{config.name}, seed {config.seed}:\n\n{markdown(header, lines)}\nresults: {folder / 'results.json'}")
    made = AnswerSamples(plan)
    made.make()
    samples = made.summary()
    panels: list[Panel] = [partial(kept_panel, sample=sample) for sample in samples]
    if configured_figures(config.report.figures):
        print(f"kept: {save_panels(panels, folder / 'kept.png', config.name)}")
    print(f"page: {write_page(answers_page(results, Table(header, lines), samples, panels), folder / 'page.html')}")
    return folder


def answers_page(results: dict[str, Any], table: Table, samples: list[dict[str, Any]], panels: list[Panel]) -> Page:
    """Return the page of an answering run: its result, and what memories kept of the contexts of some questions."""
    facts = [f"seed {results['seed']}", f"split {results['answering']['split']}", commit_fact(results)]
    note = "In brackets Wilson's 95 % intervals over questions. M and N are entries and waiting queries of each layer's memory."
    examples = zip(panels, samples, strict=True)
    sections = [
        Section("Results", note, [table]),
        *(
            section
            for panel, sample in examples
            for section in picture_sections(f"A question that was {judged(sample)}", [panel], sample_note(sample))
        ),
        commands_section([results]),
    ]
    return Page(results["name"], facts, sections, ["results.json", "config.yaml", "table.csv"])
