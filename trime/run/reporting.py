"""report: write results.json, table, pictures and page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from trime.config.schema import STAGES
from trime.errors import UserError
from trime.inspection.samples import Samples, make_samples
from trime.io import copy_file, plain, write_atomically
from trime.metrics import bits
from trime.pipeline.manifest import build_seconds
from trime.plan.language_model import Plan
from trime.report.answers import answers_table
from trime.report.figures.base import Figure, configured_figures
from trime.report.figures.several import replay_picture
from trime.report.groups import is_fitted
from trime.report.memories import memories_section, memories_text
from trime.report.page import Page, Section, Table, commands_section, picture_sections, sample_sections, write_page
from trime.report.results import read_run, write_results
from trime.report.tables import EDGE_NOTE, FITTED_NOTE, analysis_text, markdown, replay_text, run_table
from trime.report.texts import evaluated_text, smoke_test_note, text_facts
from trime.run.provenance import PROVENANCE, provenance
from trime.stages.analysis.per_token import FILE
from trime.stages.evaluate import policy_name
from trime.stages.prepare import PreparedText

BASELINE_NOTE = (
    "The row vocabulary is this model without its memories, not a baseline: a model trained plainly does better without them. "
    "report.baseline=vanilla trains that one too, at the same budget, and compares."
)

MAKING = [stage for stage in STAGES if stage != "report"]  # stages that make artefacts


class RunReport(NamedTuple):
    """What was reported of a run: its results, the samples on its page, and the file of each figure by the figure's name."""

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    figures: dict[str, Path]


def report_run(plan: Plan) -> RunReport:
    """Write results.json, config.yaml, metrics.csv, table, pictures and page of a run, and print the table and the paths."""
    config, folder = plan.config, plan.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    samples = make_samples(plan)
    results = keep_provenance(folder / "results.json", collect_results(plan))
    results["made_from"] = sorted([*results["made_from"], *([Samples(plan).name] if samples else [])])
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    if config.logger.history:
        copy_file(plan.model.path() / "metrics.csv", folder / "metrics.csv")
    table = "\n".join([markdown(*run_table(results)), *(f"{note}\n" for note in run_notes(results))])
    write_atomically(folder / "table.md", table)
    if "subsets" in results:
        text = memories_text(results)
        write_atomically(folder / "memories.md", text)
        print(f"\n{text}")
    if "analysis" in results:
        text = analysis_text(results)
        write_atomically(folder / "analysis.md", text)
        print(f"\n{text}")
    figures = configured_figures(config.report.figures)
    drawn = draw_figures(figures, results, folder)
    page = write_page(run_page(results, folder / "metrics.csv", [*figures.values()], samples), folder / "page.html")
    print(f"\n{config.name}, seed {config.seed}, on {text_facts(results)}\n\n{table}")
    print(f"results: {folder / 'results.json'}")
    tokens = [("tokens", plan.per_token.path() / FILE)] if plan.per_token else []
    for name, path in [*tokens, *drawn.items(), ("page", page)]:
        print(f"{name}: {path}")
    return RunReport(results, samples, drawn)


def draw_figures(figures: dict[str, Figure], results: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Draw every figure that has panels for a run into the run's folder; return the file of each by its name."""
    headline = f"{results['name']} on {evaluated_text(results).title}, seed {results['seed']}"
    drawn = {}
    for name, figure in figures.items():
        if panels := figure.panels(results, folder / "metrics.csv"):
            drawn[name] = figure.save(panels, headline, folder / f"{name}.png", figure.height(results))
    return drawn


def run_page(results: dict[str, Any], history: Path, figures: list[Figure], samples: list[dict[str, Any]]) -> Page:
    """Return the page of a run: results, memories, figures, samples and its command."""
    train, machine = results["train"], results["hardware"]
    facts = [
        text_facts(results),
        f"seed {results['seed']}",
        *([f"{results['parameters']:,} parameters"] if results["parameters"] else []),
        *([f"{train['updates']:,} updates"] if train.get("updates") else []),
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores",
        f"commit {(results['commit'] or 'unknown')[:12]}",
    ]
    note = "The last row is the experiment's own. Temperatures, weights and sizes were tuned on dev; test was scored once."
    note = " ".join([note, *run_notes(results)])
    table = Table(*run_table(results), emphasise_last=True)
    return Page(
        results["name"],
        facts,
        [
            Section("Results", note, [table]),
            *memories_section(results),
            *(section for figure in figures for section in picture_sections(figure.title, figure.panels(results, history))),
            *sample_sections(samples),
            commands_section([results]),
        ],
    )


def run_notes(results: dict[str, Any]) -> list[str]:
    """Return what a reader of a run's table has to know."""
    has_memories, rows = len(results["metrics"]["test"]) > 1, results["metrics"]["valid"]
    notes = {
        smoke_test_note(evaluated_text(results)): True,
        BASELINE_NOTE: results["trained_with_memory"] and has_memories and "report.baseline=" not in (results["command"] or ""),
        FITTED_NOTE: is_fitted(results),
        EDGE_NOTE: any(row.get("at_grid_edge") for row in rows),
    }
    return [note for note, applies in notes.items() if note and applies]


def report_replay(plan: Plan) -> None:
    """Write and print the table and the picture of what every eviction policy retains."""
    folder, results = plan.run_folder, plan.replay.summary()
    folder.mkdir(parents=True, exist_ok=True)
    text = replay_text(results)
    write_atomically(folder / "replay.json", json.dumps(results, indent=1))
    write_atomically(folder / "replay.md", text)
    print(f"\n{text}\nreplay: {replay_picture(results, folder / 'replay.png')}")


def report_answers(plan: Plan) -> Path:
    """Write results.json of an answering run and print its table line; return the run's folder."""
    config, folder = plan.config, plan.answers_folder
    folder.mkdir(parents=True, exist_ok=True)
    row = plan.answer.summary() | plan.answer.reading()
    row |= {"eviction": policy_name(plain(config.eviction)), "max_prompt_tokens": config.answering.max_prompt_tokens}
    results = provenance(config) | {
        "questions": plain(config.questions),
        "answering": {"split": config.answering.split, "question_first": config.answering.question_first},
        "model": config.model.name or str(plan.small_model.path()),  # type: ignore[union-attr]
        "small_model": plan.small_model.recipe() if plan.small_model else None,
        "metrics": {config.answering.split: [row]},
        "made_from": made_from(plan, "train_small", "answer"),
    }
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    header, lines = answers_table([results])
    print(f"\n{config.name}, seed {config.seed}:\n\n{markdown(header, lines)}\nresults: {folder / 'results.json'}")
    return folder


def collect_results(plan: Plan) -> dict[str, Any]:
    """Return the content of a run's results.json."""
    config, model = plan.config, plan.model.path()
    evaluated = dataset_of(plan.evaluated_corpus)
    train = json.loads((model / "train.json").read_text()) if (model / "train.json").exists() else {}
    tuned = plan.tune.tuned()
    characters = plan.test.summary()["characters"]
    results = provenance(config) | {
        "dataset": dataset_of(plan.corpus),
        "parameters": train.pop("parameters", None),
        "train": train,
        "trained_with_memory": config.memory.get("_target_") is not None and not config.checkpoint,
        "tuned": tuned["rows"][-1]["tuned"],
        "sample": config.evaluate.sample,
        "metrics": {
            "valid": [with_bits(row, characters, bytes_per_token(evaluated, "valid")) for row in tuned["rows"]],
            "test": [with_bits(row, characters, bytes_per_token(evaluated, "test")) for row in plan.evaluate.rows()],
        },
        "durations": durations(plan),
        "made_from": made_from(plan, *MAKING),
        "artefacts": {"fit": str(model), "evaluate": str(plan.evaluate.folder)},
    }
    if (model / "staleness.json").exists():
        results["staleness"] = json.loads((model / "staleness.json").read_text())
    if plan.subsets:
        results["subsets"] = plan.subsets.summary()
    if plan.analysis:
        results["analysis"] = plan.analysis.summary()
    if (model / "imported.json").exists():
        results["imported"] = json.loads((model / "imported.json").read_text())
        results["parameters"] = results["imported"]["parameters"]
    if plan.evaluated_corpus is not plan.corpus:
        results["evaluation_dataset"] = evaluated
    if plan.index:
        source = plan.index.store_summary()
        results["datastore"] = plan.index.summary() | tuned["recall"] | {"dataset": source["dataset"], "split": source["split"]}
    return results


def dataset_of(prepared: PreparedText) -> dict[str, Any]:
    """Return name, place, fingerprints, vocabulary size and notes of a corpus; tokens, bytes and share of unknown by split."""
    corpus = prepared.corpus()
    statistics, splits = corpus.statistics, corpus.statistics["splits"]
    return {
        "name": statistics["name"],
        "path": statistics["place"],
        "own": statistics["own"],
        "fingerprint": statistics["fingerprint"],
        "test_hash": corpus.fingerprint("test") if "test" in splits else None,
        "tokens": {name: split["tokens"] for name, split in splits.items()},
        "bytes": {name: split["bytes"] for name, split in splits.items()},
        "unknown": {name: split["unknown"] / split["tokens"] for name, split in splits.items()},
        "vocabulary": statistics["vocabulary"],
        "notes": statistics["notes"],
    }


def bytes_per_token(dataset: dict[str, Any], split: str) -> float:
    """Return the mean number of bytes of a split's tokens."""
    return dataset["bytes"][split] / dataset["tokens"][split]


def with_bits(row: dict[str, Any], characters: bool, bytes_per_token: float) -> dict[str, Any]:
    """Return a row with its bits per byte of text, and per character where tokens are characters."""
    per_byte = {"bits_per_byte": bits(row["loss"]) / bytes_per_token}
    return row | per_byte | ({"bits_per_character": bits(row["loss"])} if characters else {})


def made_from(plan: Plan, *stages: str) -> list[str]:
    """Return the names of the artefacts of some stages, and of the folders that the configuration names in their place."""
    config = plan.config
    named = (config.checkpoint, config.datastore.path, config.mixture.get("path"), config.model.get("name"))
    artefacts = [artefact.name for stage in stages for artefact in plan.made_by(stage)]
    return sorted({*artefacts, *(Path(path).name for path in named if path)})


def durations(plan: Plan) -> dict[str, float]:
    """Return the seconds that each stage's artefacts took to build, whichever run built them."""
    made = {stage: [artefact.folder for artefact in plan.made_by(stage)] for stage in MAKING}
    return {
        stage: round(sum(build_seconds(folder) for folder in folders if folder.exists()), 2)
        for stage, folders in made.items()
        if folders
    }


def keep_provenance(file: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the provenance of the earlier ones in ``file``, if those are of the same evaluation.

    A later command that finds everything made, to analyse it or on other devices, did not make these results.
    """
    try:
        earlier = read_run(file)
    except UserError:
        return results
    if earlier.get("artefacts") != results["artefacts"]:
        return results
    return results | {key: earlier[key] for key in PROVENANCE if key in earlier}
