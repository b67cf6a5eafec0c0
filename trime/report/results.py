"""Read and write the results.json files of runs, which carry a checksum of their own content."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trime.common.io import checksum_of, compact_json, write_atomically
from trime.errors import UserError
from trime.report.run_result import AnsweringRun, RunResult, ScoredRun, is_run, run_from_json, without_paths

RESULTS = "results.json"  # in a run's folder; kept results have names of their own
SHOWN_FILES = 5  # names of files that a line lists
OBSERVED = {"loss", "tokens", "documents", "bleu", "exact_match", "contained", "by_depth", "questions"}  # fields of a row
PLACES = ("path", "babi", "background")  # settings of texts and questions that are paths
CHECKSUM = "checksum"  # the key of results.json that holds it


def write_results(path: Path, run: RunResult) -> None:
    content = run.to_json()
    write_atomically(path, compact_json(content | {CHECKSUM: checksum_of(content)}, path))


def read_run(path: Path) -> RunResult:
    """Return the results of a run; UserError if a file is truncated, not a run's, or was changed after it was written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there are no results in {path.parent}: run its experiment first") from None
    except (OSError, ValueError):
        raise UserError(f"{path} is truncated or no JSON: delete it and run its experiment again") from None
    return run_of(content, path)


def run_of(content: dict[str, Any], path: Path) -> RunResult:
    """Return the results in a file's content; UserError if they are not a run's, or were changed after they were written."""
    if not is_run(content):
        raise UserError(f"{path} is not the results of a run: delete it and run its experiment again")
    # Versions that wrote no checksum are accepted as they are.
    content = dict(content)
    if content.pop(CHECKSUM, None) not in (None, checksum_of(content)):
        raise UserError(f"{path} was changed after it was written: delete it and run its experiment again")
    try:
        return run_from_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not the results of a run ({error}): delete it and run its experiment again") from None


def read_runs(files: Iterable[Path]) -> list[RunResult]:
    """Return the results in some files, each once, by the order of their paths."""
    return [read_run(path) for path in sorted({path.resolve() for path in files})]


def find_runs(patterns: list[str]) -> list[RunResult]:
    """Return the results of all runs that some patterns match, each once.

    A pattern names files (a .jsonl holds several runs), run folders, or folders below which all results are found. One line
    names the files that hold something else, and the patterns that match no results.
    """
    paths: set[Path] = set()
    campaigns: set[Path] = set()
    others: set[Path] = set()
    for pattern in patterns:
        files: set[Path] = set()
        kept: set[Path] = set()
        for path in map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)):
            below = glob.glob(f"{glob.escape(str(path))}/**/*.json", recursive=True)  # follows links, as the pattern does
            files |= {*map(Path, below)} if path.is_dir() else {path} & {path.with_suffix(".json")}
            if path.suffix == ".jsonl" and not (path.parent / RESULTS).exists():
                kept.add(path)
        campaigns |= kept
        # Other JSON files beside or below a results.json are the run's own.
        files = {file for file in files if file.name == RESULTS or not any((up / RESULTS).exists() for up in file.parents)}
        if not files and not kept and len(patterns) > 1:
            print(f"report: {pattern} matches no results of a run")
        for file in files:
            try:
                holds_results = file.name == RESULTS or is_run(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                raise UserError(f"{file} is truncated or no JSON: delete it, or name other files in report.runs") from None
            (paths if holds_results else others).add(file)
    if others:
        names = sorted(str(file) for file in others)
        more = f" and {len(names) - SHOWN_FILES:,} more" if len(names) > SHOWN_FILES else ""
        print(f"report: left out, as they hold no results of a run: {', '.join(names[:SHOWN_FILES])}{more}")
    return [*read_runs(paths), *(run for file in sorted(campaigns) for run in campaign(file))]


def campaign(file: Path) -> list[RunResult]:
    """Return the results of the runs that a campaign's file holds, one a line; UserError if it is damaged."""
    try:
        contents = [json.loads(line)["results"] for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is truncated or holds something else: take it from the repository again") from None
    return [run_of(content, file) for content in contents]


def distinct_runs(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return every observation once, and print which runs are copies of others: another folder or name is no second seed.

    Two runs are one observation if settings, texts and results are equal. The copy that recorded most is kept: an analysis
    does not change what was observed.
    """
    found: dict[str, list[RunResult]] = {}
    facts: list[Any]
    for run in runs:
        # Times and memory are no observations, and a seed that changed the losses of no document changed nothing.
        results = {split: [row.model_dump(include=OBSERVED) for row in rows] for split, rows in run.metrics.items()}
        if isinstance(run, ScoredRun):
            facts = [run.config_hash or [run.name, run.parameters], run.text, run.other_texts, results]
        else:
            assert isinstance(run, AnsweringRun)  # its seed counts where it trained the model that answers
            asked = {key: value for key, value in run.questions.items() if key not in PLACES}
            facts = [run.config_hash, asked, run.questions_text, run.seed if run.small_model else None, results]
        found.setdefault(checksum_of(facts), []).append(run)
    copies = [(run, first) for first, *rest in found.values() for run in rest]
    if copies:
        names = [f"{run.name} seed {run.seed} (of {first.name} seed {first.seed})" for run, first in copies]
        print(f"report: counted once, as settings and results are the same: {', '.join(names)}")
    # An analysis does not change what was observed: the run that recorded most is kept.
    return [max(same, key=lambda run: len(run.model_fields_set)) for same in found.values()]


def portable(run: RunResult) -> RunResult:
    """Return the results of a run without paths of this machine."""
    content = {key: value for key, value in run.to_json().items() if key != "artefacts"}
    content["command"] = without_paths(run.command)
    for key in {"dataset", "evaluation_dataset", "questions"} & content.keys():
        content[key] = {name: value for name, value in content[key].items() if name not in PLACES}
    return run_from_json(content)


def keep_results(runs: Sequence[RunResult], folder: Path) -> None:
    """Copy the results of runs into one folder, without paths of this machine; a run that was made again replaces itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in map(portable, runs):
        text = run.evaluated.fingerprint[:4] if isinstance(run, ScoredRun) else ""  # config_hash does not depend on paths
        name = f"{run.name}-seed{run.seed}-{str(run.config_hash)[:6]}{text}"
        file, texts = folder / f"{name}.json", texts_of(run)
        # Settings name no paths, so that runs on other texts may have the same hash.
        earlier = texts_of(read_run(file)) if file.is_file() else {}  # one of an earlier version may lack some
        if any(earlier.get(use) and text and earlier[use] != text for use, text in texts.items()):
            file = folder / f"{name}-{checksum_of(texts)[:4]}.json"
        write_results(file, run)
    print(f"kept {len(runs)} results in {folder}")


def texts_of(run: RunResult) -> dict[str, str]:
    """Return the fingerprints of texts that a file's name does not have: a model's, a datastore's, those of questions."""
    texts = {use: text for use, (_, text) in run.other_texts.items()} if isinstance(run, ScoredRun) else {}
    return texts | {"questions": (run.questions_text or "") if isinstance(run, AnsweringRun) else ""}
