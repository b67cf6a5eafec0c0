"""A split that is scored in parts gives the figures of one pass, whatever memories carry from window to window."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.conftest import Tiny
from trime.lab.runner import run
from trime.stages import scoring
from trime.stages.encode import read_windows
from trime.stages.graph import Graph
from trime.stages.scoring import spans_of
from trime.token_memory.test.base import StateScope

STAGES = "prepare,pack,fit,encode,index,tune,evaluate"


def figures(config: DictConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the stages tune and evaluate anew; return the rows on test and the tuned settings, without what was measured."""
    graph = Graph(config)
    for artefact in (*graph.tune.build_order(), graph.evaluate):
        shutil.rmtree(artefact.folder, ignore_errors=True)
    run(config)
    measured = {"tokens_per_second", "peak_memory_mb", "seconds", "processor_ms_per_token"}
    tuned, *rows = ({name: row[name] for name in row.keys() - measured} for row in (graph.tune.tuned(), *graph.evaluate.rows()))
    return rows, tuned


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=trime_long", "eviction=lra_sum"),
        ("experiment=cache_long", "long.across_documents=true", "mixture=none"),
        pytest.param(("experiment=trime_all_ngram",), marks=pytest.mark.slow),
    ],
)
def test_parts_give_the_figures_of_one_pass(
    words: tuple[str, ...], tiny: Tiny, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "dataset=folder_words", f"dataset.path={text_folder}"
    config = tiny(*words, *text, f"paths.outputs={tmp_path}/outputs", f"stages=[{STAGES}]")
    (whole, tuned_whole) = figures(config)
    monkeypatch.setattr(scoring, "SPAN", 200)
    parts, tuned_parts = figures(config)
    assert len(parts) == len(whole)
    for part, all_at_once in zip(parts, whole, strict=True):
        assert equal(part, all_at_once)
    assert equal(tuned_parts, tuned_whole)


def equal(one: Any, other: Any) -> bool:
    """Return True if two results are equal, but for the rounding of sums in float32."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == pytest.approx(other, rel=1e-5) if isinstance(one, float) else one == other


def test_parts_begin_without_a_state(tiny: Tiny, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "dataset=folder_words", f"dataset.path={text_folder}"
    text += ("evaluate.sample=starts",)  # of more documents than whole ones would be
    config = tiny("experiment=cache", *text, f"paths.outputs={tmp_path}/outputs", "stages=[prepare,fit,encode]")
    run(config)
    encoded = Graph(config).valid
    windows = [*read_windows(encoded.path(), encoded.hardware.device)]
    monkeypatch.setattr(scoring, "SPAN", 100)
    for carried in StateScope:
        parts = spans_of(encoded, carried)
        read = [[*scoring.windows_of(encoded, part)] for part in parts]
        assert [len(window.contexts.token) for part in read for window in part] == [len(w.contexts.token) for w in windows]
        assert [sum(len(window.query.token) for window in part) for part in read] == [part.tokens for part in parts]
        assert [part.before for part in parts] == [sum(part.tokens for part in parts[:number]) for number in range(len(parts))]
        first = [{int(document) for window in part for document in window.contexts.positions.document} for part in read]
        if carried == StateScope.CORPUS:
            assert len(parts) == 1
        else:
            assert len(parts) > 2 and all(part.tokens >= 100 for part in parts[:-1])
        if carried == StateScope.DOCUMENT:
            assert sum(map(len, first)) == len(set.union(*first))
