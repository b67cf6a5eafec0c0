"""Collect what a finished run measured: the content of its results.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.metrics import bits
from trime.config.schema import STAGES
from trime.data.segments import scored_bytes
from trime.errors import UserError
from trime.lab.artefact import Artefact
from trime.lab.manifest import build_seconds
from trime.lab.provenance import PROVENANCE, provenance
from trime.report.results import read_run
from trime.report.run_result import Dataset, Datastore, Row, ScoredRun, ScoredText, Subsets, Training
from trime.stages.graph import Graph
from trime.stages.prepare import Prepare

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
    # A folder that the configuration names stands for artefacts, which pruning must spare as well.
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
