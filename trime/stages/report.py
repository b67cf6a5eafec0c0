"""report: write results.json, table, pictures and page of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from trime.common.io import copy_file, plain, write_atomically
from trime.common.metrics import bits
from trime.config.paths import make_absolute
from trime.config.schema import STAGES
from trime.data.segments import scored_bytes
from trime.errors import UserError
from trime.lab.artefact import Artefact
from trime.lab.manifest import build_seconds
from trime.lab.provenance import PROVENANCE, provenance
from trime.lab.stage import RunOutcome, Stage
from trime.lab.sweep import runs_of_sweep
from trime.lab.tracking import log_once
from trime.report import tables
from trime.report.page import place_of, sample_sections
from trime.report.passages import Sample
from trime.report.report_run import TOKENS, result_sections, write_answers_page, write_run_page
from trime.report.results import read_run, write_results
from trime.report.run_result import AnsweringRun, AnswerRow, Dataset, Datastore, Row, ScoredRun, ScoredText, Subsets, Training
from trime.report.terminal import answers_lines, answers_verdict, ending, run_lines, run_result, run_verdict
from trime.stages.evaluate import policy_name
from trime.stages.graph import Graph
from trime.stages.prepare import Prepare
from trime.stages.samples import OutOfTimeError, samples_of

MAKING = [stage for stage in STAGES if stage != "report"]  # stages that make artefacts


def collect_results(graph: Graph, also: Iterable[Artefact] = ()) -> ScoredRun:
    """Return the results of a run; ``also`` are artefacts of its report."""
    config, model, metric = graph.config, graph.model.path(), graph.evaluated_corpus.metric

    def noted(name: str) -> Any:
        """Return the content of a JSON file of the model; None if there is none."""
        return json.loads((model / name).read_text(encoding="utf-8")) if (model / name).exists() else None

    # A model is trained here or imported, and an imported one has no train.json.
    train, imported, tuned = noted("train.json") or {}, noted("imported.json"), graph.tune.tuned()
    parameters = train.pop("parameters", None)
    scored, durations = {}, {}
    for encoded in (graph.valid, graph.test):
        corpus = encoded.corpus.corpus()
        windows = encoded.windows(corpus)
        size, documents = round(scored_bytes(corpus, encoded.split, windows)), len(np.unique(windows.document))
        scored[encoded.split] = ScoredText(tokens=windows.scored(), bytes=size, documents=documents)
    for stage in MAKING:  # whichever run built its artefacts
        if folders := [artefact.folder for artefact in graph.artefacts_of(stage)]:
            durations[stage] = round(sum(build_seconds(folder) for folder in folders if folder.exists()), 2)
    rows = {"valid": tuned["rows"], "test": graph.evaluate.rows()}
    described = {name: memory.description() for name, memory in graph.memories.stored.items()}
    stores = {name: Datastore(**(about | tuned["recall"][name])) for name, about in described.items() if about}
    content: dict[str, Any] = {
        "subsets": Subsets(**graph.subsets.summary()) if graph.subsets else None,
        "analysis": graph.analysis.summary() if graph.analysis else None,
        "imported": imported,
        "evaluation_dataset": dataset_of(graph.evaluated_corpus) if graph.evaluated_corpus is not graph.corpus else None,
        "datastore": next(iter(stores.values()), None),  # the one that tables and pages show
        "datastores": stores or None,
    }
    return ScoredRun(
        **provenance(config),
        dataset=dataset_of(graph.corpus),
        parameters=imported["parameters"] if imported else parameters,
        train=Training(**train),
        trained_with_memory=config.memory.get("_target_") is not None and not config.checkpoint,
        tuned=tuned["rows"][-1]["tuned"],
        sample=graph.test.portion.sample,
        metrics={split: [with_bits(row, metric, scored[split]) for row in of_split] for split, of_split in rows.items()},
        scored=scored,
        duplicates=graph.duplicates,
        durations=durations,
        made_from=made_from(graph, *MAKING, also=also),
        artefacts={"fit": str(model), "evaluate": str(graph.evaluate.folder)},
        # Fields without a value are left out of results.json altogether, as earlier versions did.
        **{name: value for name, value in content.items() if value is not None},
    )


def dataset_of(prepared: Prepare) -> Dataset:
    """Return name, location, fingerprints, vocabulary size, notes of a corpus; tokens, bytes, share of unknown by split."""
    corpus, given = prepared.corpus(), prepared.dataset  # the prepared text may have been another folder of the same files
    statistics, splits = corpus.statistics, corpus.statistics["splits"]
    return Dataset(
        name=given.name,
        path=str(given.location),
        own=given.own,
        fingerprint=statistics["fingerprint"],
        test_hash=corpus.fingerprint("test") if "test" in splits else None,
        tokens={name: split["tokens"] for name, split in splits.items()},
        bytes={name: split["bytes"] for name, split in splits.items()},
        unknown={name: split["unknown"] / split["tokens"] for name, split in splits.items()},
        vocabulary=statistics["vocabulary"],
        notes=statistics["notes"],
    )


def with_bits(row: dict[str, Any], metric: str, text: ScoredText) -> Row:
    """Return a row with its bits per predicted byte of text, and with its metric unless that is perplexity."""
    # A row's metric is perplexity unless it says otherwise.
    per_token = {"bits/char": {"bits_per_character": bits(row["loss"])}, "bits/byte": {"metric": metric}}
    return Row(**row, bits_per_byte=bits(row["loss"]) / (text.bytes / text.tokens), **per_token.get(metric, {}))


def made_from(graph: Graph, *stages: str, also: Iterable[Artefact] = ()) -> list[str]:
    """Return the names of the artefacts of some stages, and of the folders that the configuration names in their place."""
    config = graph.config
    # A folder that the configuration names is in the place of artefacts: pruning must spare it as well.
    stores = [memory.config.datastore.path for memory in graph.memories.stored.values()]
    named = (config.checkpoint, config.datastore.path, *stores, config.mixture.get("path"), config.model.get("name"))
    artefacts = [*also, *(artefact for stage in stages for artefact in graph.artefacts_of(stage))]
    return sorted({*(artefact.name for artefact in artefacts), *(Path(path).name for path in named if path)})


def keep_provenance(file: Path, results: ScoredRun) -> ScoredRun:
    """Return results with the provenance of the earlier ones in ``file``, if those are of the same evaluation.

    A later command that finds everything made, to analyse it or on other devices, did not make these results.
    """
    try:
        earlier = read_run(file)
    except UserError:
        return results
    if not isinstance(earlier, ScoredRun) or earlier.artefacts != results.artefacts:
        return results
    return results.model_copy(update={key: getattr(earlier, key) for key in PROVENANCE})


log = logging.getLogger(__name__)


def report_run(graph: Graph) -> RunOutcome:
    """Write results.json, config.yaml, metrics.csv, table, pictures and page of a run, print table and verdict, and log the
    report once to each logger; return the run's loss and folder.
    """
    config, folder = graph.config, graph.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    sampled = samples_of(graph)
    # The samples' artefact is of the run before it is drawn, so that pruning does not take the passages drawn so far.
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
    if is_alone:  # pictures and pages follow, which may take longer than the results did
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
    own = [*graph.own_sections(run), *sample_sections(samples, graph.samples_title)]
    pictures, page = write_run_page(run, folder, sections, config.report.figures, own)
    if is_alone:
        print(ending(verdict, run_lines(run, table), tables.text_notes(run), place_of(page)), flush=True)
    else:  # a sweep ends with a table of all
        print(f"{run_result(run)}, {page}", flush=True)
    # After all files: the loggers get what the page shows.
    log_once(lambda: graph.loggers, plain(config.logger), folder, run, samples, pictures)
    return RunOutcome(run.dev.loss, (folder,))


def report_answers(graph: Graph) -> RunOutcome:
    """Write results.json, table, picture and page of an answering run, and print table and verdict."""
    config, folder = graph.config, graph.answers_folder
    folder.mkdir(parents=True, exist_ok=True)
    run = collect_answers(graph)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_results(folder / "results.json", run)
    page = write_answers_page(run, folder)
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
