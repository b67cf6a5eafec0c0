"""report: write results.json, table, pictures and page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import OmegaConf

from trime.inspection.samples import make_samples
from trime.io import copy_file, plain, write_atomically
from trime.metrics import bits
from trime.plan.language_model import Plan
from trime.report.answers import answers_table
from trime.report.figures.base import Figure
from trime.report.figures.several import replay_picture
from trime.report.groups import is_fitted
from trime.report.memories import memories_section, memories_text
from trime.report.page import Page, Section, Table, commands_section, picture_sections, sample_sections, write_page
from trime.report.results import write_results
from trime.report.tables import EDGE, EDGE_NOTE, FITTED_NOTE, analysis_text, evaluated_text, markdown, replay_text, run_table
from trime.run.provenance import provenance
from trime.stages.evaluate import policy_name
from trime.stages.prepare import PreparedText


class RunReport(NamedTuple):
    """What was reported of a run: its results, the samples on its page, and the file of each figure by the figure's name."""

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    figures: dict[str, Path]


def report_run(plan: Plan) -> RunReport:
    """Write results.json, config.yaml, metrics.csv, table, pictures and page of a run, and print the table and the paths."""
    config, folder = plan.config, plan.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    results = collect_results(plan)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    if config.logger.history:
        copy_file(plan.model.path() / "metrics.csv", folder / "metrics.csv")
    table = markdown(*run_table(results))
    table += f"\n{EDGE_NOTE}\n" * (EDGE in table) + f"\n{FITTED_NOTE}\n" * is_fitted(results)
    write_atomically(folder / "table.md", table)
    if "subsets" in results:
        text = memories_text(results)
        write_atomically(folder / "memories.md", text)
        print(f"\n{text}")
    if "analysis" in results:
        text = analysis_text(results)
        write_atomically(folder / "analysis.md", text)
        print(f"\n{text}")
    figures: dict[str, Figure] = instantiate(config.report.figures, _convert_="all")
    drawn = draw_figures(figures, results, folder)
    samples = make_samples(plan)
    page = write_page(run_page(results, folder / "metrics.csv", [*figures.values()], samples), folder / "page.html")
    print(f"\n{config.name}, seed {config.seed}, on {results['dataset']['name']}:\n\n{table}")
    print(f"results: {folder / 'results.json'}")
    for name, path in [*drawn.items(), ("page", page)]:
        print(f"{name}: {path}")
    return RunReport(results, samples, drawn)


def draw_figures(figures: dict[str, Figure], results: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Draw every figure that has panels for a run into the run's folder; return the file of each by its name."""
    headline = f"{results['name']} on {evaluated_text(results)[0]}, seed {results['seed']}"
    drawn = {}
    for name, figure in figures.items():
        if panels := figure.panels(results, folder / "metrics.csv"):
            drawn[name] = figure.save(panels, headline, folder / f"{name}.png", figure.height(results))
    return drawn


def run_page(results: dict[str, Any], history: Path, figures: list[Figure], samples: list[dict[str, Any]]) -> Page:
    """Return the page of a run: results, memories, figures, samples and its command."""
    text, train, machine = evaluated_text(results), results["train"], results["hardware"]
    facts = [
        f"text: {text[0]}, {text[2]:,} test tokens",
        f"seed {results['seed']}",
        *([f"{results['parameters']:,} parameters"] if results["parameters"] else []),
        *([f"{train['updates']:,} updates"] if train.get("updates") else []),
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores",
        f"commit {(results['commit'] or 'unknown')[:12]}",
    ]
    note = "The last row is the experiment's own. Temperatures, weights and sizes were tuned on dev; test was scored once."
    note += f" {FITTED_NOTE}" * is_fitted(results)
    table = Table(*run_table(results), emphasise_last=True)
    note += f" {EDGE_NOTE}" * any(EDGE in cell for line in table.lines for cell in line)
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
    }
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", results)
    header, lines = answers_table([results])
    print(f"\n{config.name}, seed {config.seed}:\n\n{markdown(header, lines)}\nresults: {folder / 'results.json'}")
    return folder


def collect_results(plan: Plan) -> dict[str, Any]:
    """Return the content of a run's results.json."""
    config, model = plan.config, plan.model.path()
    train = json.loads((model / "train.json").read_text()) if (model / "train.json").exists() else {}
    tuned = plan.tune.tuned()
    characters = plan.test.summary()["characters"]
    results = provenance(config) | {
        "dataset": dataset_of(plan.corpus),
        "parameters": train.pop("parameters", None),
        "train": train,
        "tuned": tuned["rows"][-1]["tuned"],
        "metrics": {
            "valid": [with_bits(row, characters) for row in tuned["rows"]],
            "test": [with_bits(row, characters) for row in plan.evaluate.rows()],
        },
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
        results["evaluation_dataset"] = dataset_of(plan.evaluated_corpus)
    if plan.index:
        source = plan.index.store_summary()
        results["datastore"] = plan.index.summary() | tuned["recall"] | {"dataset": source["dataset"], "split": source["split"]}
    return results


def dataset_of(prepared: PreparedText) -> dict[str, Any]:
    """Return name, fingerprint, tokens by split, vocabulary size and notes of a corpus."""
    statistics = prepared.corpus().statistics
    return {
        "name": statistics["name"],
        "fingerprint": statistics["fingerprint"],
        "tokens": {name: split["tokens"] for name, split in statistics["splits"].items()},
        "vocabulary": statistics["vocabulary"],
        "notes": statistics["notes"],
    }


def with_bits(row: dict[str, Any], characters: bool) -> dict[str, Any]:
    """Return a row, with its bits per character where tokens are characters."""
    return row | ({"bits_per_character": bits(row["loss"])} if characters else {})
