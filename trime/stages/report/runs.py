"""report: results.json, the table and the picture of a run; or one table of several runs."""

from __future__ import annotations

import glob
import json
import os
import platform
import shlex
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trime.metrics import bits, perplexity
from trime.stages.artefact import copied, plain, write_aside
from trime.stages.evaluate import named
from trime.stages.plan import Plan
from trime.stages.prepare import Prepare
from trime.stages.report.answers import answers_panels, answers_picture, answers_table, policies_grid
from trime.stages.report.compare import Published, compare_table, grouped, ordering
from trime.stages.report.ledger import config_hash, read_run
from trime.stages.report.page import Page, Section, Table, pictured, sampled, write_page
from trime.stages.report.picture_run import analysis_panels, analysis_picture, run_panels, run_picture
from trime.stages.report.picture_several import (
    compare_picture,
    curves_picture,
    policies_picture,
    replay_picture,
    several_panels,
)
from trime.stages.report.samples import samples_of
from trime.stages.report.tables import Lines, analysis_text, csv_of, evaluated, markdown, replay_text, run_table
from trime.types import UserError

PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "faiss-cpu", "faiss-gpu", "bm25s", "rank-bm25", "numpy", "wandb")


def report_run(plan: Plan) -> dict[str, Any]:
    """Writes results.json, config.yaml, metrics.csv, table and picture; prints the table and the picture's path."""
    config, folder = plan.config, plan.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    results = collected(plan)
    write_aside(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_aside(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False))
    if config.logger.history:
        copied(plan.model.path() / "metrics.csv", folder / "metrics.csv")
    header, lines = run_table(results)
    write_aside(folder / "table.md", markdown(header, lines))
    if "analysis" in results:
        text = analysis_text(results)
        write_aside(folder / "analysis.md", text)
        print(f"\n{text}\nanalysis: {analysis_picture(results, folder / 'analysis.png')}")
    picture = run_picture(results, folder / "metrics.csv", folder / "picture.png")
    page = write_page(run_page(results, folder / "metrics.csv", samples_of(plan)), folder / "page.html")
    print(f"\n{config.name}, seed {config.seed}, on {results['dataset']['name']}:\n\n{markdown(header, lines)}")
    print(f"results: {folder / 'results.json'}\npicture: {picture}\npage: {page}")
    return results


def run_page(results: dict[str, Any], history: Path, samples: list[dict[str, Any]]) -> Page:
    """All that is known of a run."""
    text, train, machine = evaluated(results), results["train"], results["hardware"]
    facts = [
        f"text: {text[0]}, {text[2]:,} tokens of test",
        f"seed {results['seed']}",
        *([f"{results['parameters']:,} parameters"] if results["parameters"] else []),
        *([f"{train['updates']:,} updates"] if train.get("updates") else []),
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores",
        f"commit {(results['commit'] or 'unknown')[:12]}",
    ]
    note = "The last row is the experiment's own. Temperatures, shares and sizes were chosen on dev; test was scored once."
    return Page(
        results["name"],
        facts,
        [
            Section("Results", note, [Table(*run_table(results), own=True)]),
            *pictured("Curves", run_panels(results, history)),
            *pictured("Analysis", analysis_panels(results)),
            *sampled(samples),
            commands([results]),
        ],
    )


def commands(runs: list[dict[str, Any]]) -> Section:
    """The command of each run."""
    known = list(dict.fromkeys(run["command"] for run in runs if run.get("command")))
    note = (
        "Each is skipped as far as its artefacts exist." if known else "No run tells its command: config.yaml lies beside it."
    )
    return Section("Commands", note, commands=known)


def report_replay(plan: Plan) -> None:
    """Table and picture of what every policy retains."""
    folder, found = plan.run_folder, plan.replay.found()
    folder.mkdir(parents=True, exist_ok=True)
    text = replay_text(found)
    write_aside(folder / "replay.json", json.dumps(found, indent=1))
    write_aside(folder / "replay.md", text)
    print(f"\n{text}\nreplay: {replay_picture(found, folder / 'replay.png')}")


def report_answers(plan: Plan) -> Path:
    """results.json of an answering run, and its line; the folder that holds it."""
    config, found = plan.config, plan.answer.found()
    folder = Path(config.paths.outputs) / "runs" / config.name / f"seed{config.seed}-{plan.answer.fingerprint[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    row = found | plan.answer.reading() | {"eviction": named(plain(config.eviction)), "last": config.answering.last}
    results = provenance(config) | {
        "questions": plain(config.questions),
        "answering": {"split": config.answering.split, "question_first": config.answering.question_first},
        "model": config.model.name or str(plan.taught.path()),  # type: ignore[union-attr]
        "taught": plan.taught.recipe() if plan.taught else None,
        "metrics": {config.answering.split: [row]},
    }
    write_aside(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_aside(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False))
    header, lines = answers_table([results])
    print(f"\n{config.name}, seed {config.seed}:\n\n{markdown(header, lines)}\nresults: {folder / 'results.json'}")
    return folder


def collected(plan: Plan) -> dict[str, Any]:
    """The run contract."""
    config, model = plan.config, plan.model.path()
    train = json.loads((model / "train.json").read_text()) if (model / "train.json").exists() else {}
    tuned = plan.tune.tuned()
    characters = plan.test.information()["characters"]
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
    if plan.analysis:
        results["analysis"] = plan.analysis.found()
    if (model / "imported.json").exists():
        results["imported"] = json.loads((model / "imported.json").read_text())
        results["parameters"] = results["imported"]["parameters"]
    if plan.evaluated is not plan.corpus:
        results["evaluated"] = dataset_of(plan.evaluated)
    if plan.index:
        source = plan.index.information()
        results["datastore"] = (
            plan.index.statistics() | tuned["recall"] | {"dataset": source["dataset"], "split": source["split"]}
        )
    return results


def provenance(config: DictConfig) -> dict[str, Any]:
    """What made a result: the run, its code and its machine."""
    return {
        "name": config.name,
        "seed": config.seed,
        "commit": commit(),
        "config_hash": config_hash(config),
        "versions": versions(),
        "hardware": hardware(),
        "command": command(),
    }


def command() -> str | None:
    """What the run was asked for on the command line; None where it was not started there."""
    if not HydraConfig.initialized():
        return None
    return shlex.join(["python", "cli.py", *HydraConfig.get().overrides.task])


def dataset_of(prepared: Prepare) -> dict[str, Any]:
    """Name, fingerprint, tokens and vocabulary of a corpus."""
    statistics = prepared.corpus().statistics
    return {
        "name": statistics["name"],
        "fingerprint": statistics["fingerprint"],
        "tokens": {name: split["tokens"] for name, split in statistics["splits"].items()},
        "vocabulary": statistics["vocabulary"],
        "notes": statistics["notes"],
    }


def with_bits(row: dict[str, Any], characters: bool) -> dict[str, Any]:
    """A row with bits per character beside its loss, where tokens are characters."""
    found = row | {"perplexity": perplexity(row["loss"])}
    return found | ({"bits_per_character": bits(row["loss"])} if characters else {})


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine."""
    names = [line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "gpu": device}


def cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def commit() -> str | None:
    """The commit of the code, where it runs from a checkout."""
    here = Path(__file__).resolve().parents[3]
    try:
        found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "-C", str(here), "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def report_several(config: DictConfig, patterns: list[str]) -> None:
    """One table (Markdown and CSV), picture and page of the runs that the patterns find."""
    runs = found_runs(patterns)
    if not runs:
        raise UserError(f"report.runs={', '.join(patterns)} finds no results.json: name folders of finished runs")
    folder = Path(config.paths.outputs) / "reports" / config.report.name
    folder.mkdir(parents=True, exist_ok=True)
    if answering := [run for run in runs if "questions" in run]:
        header, lines = answers_table(answering)
        write_aside(folder / "answers.md", markdown(header, lines))
        write_aside(folder / "answers.csv", csv_of(header, lines))
        print(f"\n{markdown(header, lines)}\ntable: {folder / 'answers.md'}, {folder / 'answers.csv'}")
        report_policies(answering, folder)
        sections = [
            Section("Runs", tables=[Table(header, lines)]),
            Section("Policies", tables=[Table(*policies_grid(answering))]),
        ]
        sections += [*pictured("Exact match over memory size", answers_panels(answering)), commands(answering)]
        print(f"page: {write_page(Page(config.report.name, counted(answering), sections), folder / 'answers.html')}")
    if models := [run for run in runs if "questions" not in run]:
        report_models(models, config.report.against, plain(config.report.published) or {}, folder)
    if config.report.keep:
        kept(runs, Path(config.report.keep))


def kept(runs: list[dict[str, Any]], folder: Path) -> None:
    """Their results.json side by side, without where things lie on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        own = {key: value for key, value in run.items() if key != "artefacts"}
        name = f"{run['name']}-seed{run['seed']}-{run['config_hash'][:6]}.json"
        write_aside(folder / name, json.dumps(own, indent=1, ensure_ascii=False))
    print(f"kept: {len(runs)} results in {folder}")


def counted(runs: list[dict[str, Any]]) -> list[str]:
    """How many runs, of which code."""
    commits = sorted({str(run["commit"])[:12] for run in runs})
    return [f"{len(runs)} runs", f"commit {', '.join(commits)}"]


def report_policies(runs: list[dict[str, Any]], folder: Path) -> None:
    """Exact match by policy over sizes, where there are several."""
    header, lines = policies_grid(runs)
    if len(header) > 5 or len(lines) > 1:
        write_aside(folder / "policies.md", markdown(header, lines))
        print(f"\n{markdown(header, lines)}\npicture: {answers_picture(runs, folder / 'policies.png')}")


def report_models(runs: list[dict[str, Any]], against: str, published: Published, folder: Path) -> None:
    """Table and pictures of language models, and where they stand in the papers' order."""
    groups = grouped(runs)
    header, lines = compare_table(groups, against, published)
    order = ordering(groups, published)
    ordered = f"\n{markdown(*order)}\n{verdicts(order[1])}\n" if order[1] else ""
    write_aside(folder / "table.md", markdown(header, lines))
    write_aside(folder / "table.csv", csv_of(header, lines))
    picture = compare_picture(groups, folder / "picture.png")
    write_aside(folder / "table.md", markdown(header, lines) + ordered)
    print(f"\n{markdown(header, lines)}\n* published dev / test, for the order of rows\n{ordered}")
    print(f"table: {folder / 'table.md'}, {folder / 'table.csv'}\npicture: {picture}")
    if any(run.get("analysis", {}).get("dev", {}).get("by_memory_size") for run in runs):
        print(f"sizes of long memory: {curves_picture(runs, folder / 'memory_size.png')}")
    if len({group.row.get("eviction") for group in groups} - {None}) > 1:
        print(f"policies: {policies_picture(groups, folder / 'policies.png')}")
    note = (
        f"The worst first. Differences to {against} are paired, with a 95 % interval by bootstrap over documents and seeds; "
        "no difference is shown where zero lies inside."
    )
    sections = [
        Section("Runs", note, [Table(header, lines)]),
        *pictured("Pictures", several_panels(groups, runs)),
        commands(runs),
    ]
    print(f"page: {write_page(Page(folder.name, counted(runs), sections), folder / 'page.html')}")


def verdicts(lines: Lines) -> str:
    """How many comparisons have the published sign."""
    counts = Counter(line[-1] for line in lines)
    said = {"agrees": "agree in sign", "disagrees": "disagree", "no difference shown": "show no difference"}
    return (
        f"Of {len(lines)} comparisons {', '.join(f'{counts[name]} {words}' for name, words in said.items() if counts[name])}."
    )


def found_runs(patterns: list[str]) -> list[dict[str, Any]]:
    """The results.json files at, in or below what the patterns match, each once."""
    paths: set[Path] = set()
    for pattern in patterns:
        for place in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)):
            paths |= {place} if place.name == "results.json" else set(place.glob("results.json")) if place.is_dir() else set()
    return [read_run(path) for path in sorted(path.resolve() for path in paths)]
