"""What each memory is worth: subsets of a fitted mixture's memories, weights, the frontier and its advice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.results import scored
from tests.helpers.runs import SharedRun
from trime.lab.runner import report_sweep
from trime.report.frontier import Point, advice, frontier_points, group_by_model, pareto_front
from trime.report.report_runs import report_several
from trime.report.results import find_runs, read_run, write_results
from trime.report.run_result import ScoredRun
from trime.report.tables import memories_table, memory_contribution
from trime.scoring.mixtures.experts import ExpertMasses
from trime.stages.analysis.subsets import Bins, Weights, select_memories, subsets, token_weights


def test_subsets_are_every_one_or_all_but_one() -> None:
    names = ("a", "b", "c")
    assert subsets(names, "leave_one_out") == [("a", "b"), ("a", "c"), ("b", "c"), names]
    all_subsets = subsets(names, "all")
    assert len(all_subsets) == 8 == len(set(all_subsets)) and all_subsets[0] == () and all_subsets[-1] == names
    assert subsets(("a",), "leave_one_out") == [(), ("a",)]


def test_masses_of_some_memories_is_their_columns_beside_the_vocabulary() -> None:
    column = torch.arange(6.0).expand(4, 6)
    masses = ExpertMasses(column, column + 10, torch.zeros(4, dtype=torch.long))
    all_experts = {"experts": {"a": 2, "b": 1, "c": 2}, "counts": [False, False, False, True, False, False]}
    selected, description = select_memories(masses, all_experts, ("b", "c"))
    assert selected.target[0].tolist() == [0, 3, 4, 5] and selected.total[0].tolist() == [10, 13, 14, 15]
    assert description == {"experts": {"b": 1, "c": 2}, "counts": [False, True, False, False]}


def test_weights_are_summed_by_token_and_by_what_a_memory_knows() -> None:
    bins = {
        "near": Bins("similarity", slice(1, 3), ["low", "high"], torch.tensor([0.0])),
        "grams": Bins("context", slice(3, 5), ["1", "2"], torch.zeros(0)),
    }
    nothing = -torch.inf
    total = torch.tensor([[0.0, -1.0, 0.0, 3.0, nothing], [0.0, 2.0, 0.0, 3.0, 3.0], [0.0, nothing, nothing, nothing, nothing]])
    weight = torch.tensor([[0.5, 0.1, 0.1, 0.3, 0.0], [0.1, 0.2, 0.1, 0.2, 0.4], [1.0, 0.0, 0.0, 0.0, 0.0]])
    weights = Weights(bins, vocabulary=3)
    for rows in (slice(0, 2), slice(2, 3)):
        weights.add(torch.tensor([0, 1, 2])[rows], *token_weights(bins, total[rows], weight[rows].log()))
    summary = weights.summary(np.array([1, 1, 50]))
    assert [summary[name]["largest"] for name in ("vocabulary", "near", "grams")] == pytest.approx([2 / 3, 0, 1 / 3])
    assert summary["vocabulary"]["by_frequency"][-1]["mean"] == pytest.approx(1.6 / 3)
    rare = next(cell for cell in summary["grams"]["by_frequency"] if cell["bucket"] == "≤ 10")
    assert rare["tokens"] == 2 and rare["mean"] == pytest.approx(0.45)
    near = [(cell["tokens"], cell["mean"]) for cell in summary["near"]["by_similarity"]]
    grams = [(cell["tokens"], cell["mean"]) for cell in summary["grams"]["by_context"]]
    assert near == [(1, pytest.approx(0.2)), (1, pytest.approx(0.3))]
    assert grams == [(1, pytest.approx(0.3)), (1, pytest.approx(0.6))]


def point(name: str, dev: float, seconds: float, gb: float, losses: Sequence[float] = ()) -> Point:
    """Return a point with a document of 100 tokens for each loss."""
    return Point((name,), None, dev, dev + 1, seconds, gb, tuple((100 * loss, 100) for loss in losses))


def test_the_front_holds_what_nothing_beats_and_advice_keeps_to_the_budget() -> None:
    points = [
        point("best", 10, 1.0, 4.0),
        point("near", 10.05, 0.1, 3.0),
        point("bad", 12, 0.5, 3.5),
        point("small", 20, 0.05, 0),
    ]
    assert [one.memories[0] for one in pareto_front(points, "seconds")] == ["best", "near", "small"]
    assert advice(points, None, None, "perplexity").startswith("Choose best"), "without documents there is no interval"
    assert "choose near" in advice(points, 0.3, None, "perplexity")
    assert "choose small" in advice(points, 0.3, 1.0, "perplexity")
    assert advice(points, 0.01, None, "perplexity").startswith("Nothing fits into 10 ms a token: the fastest is small")


def test_advice_is_the_fastest_point_that_noise_cannot_tell_from_the_best() -> None:
    """A search of 23 times the cost whose advantage changes sign between documents is not worth it; a shown one is."""
    sign = [(-1) ** number for number in range(20)]
    losses = {"exact": [4.0] * 20, "lists": [4.001 + 0.02 * s for s in sign], "none": [4.1 + 0.02 * s for s in sign]}
    points = [
        point(name, dev, seconds, 1.0, losses[name])
        for name, dev, seconds in (("exact", 10, 8.13e-3), ("lists", 10.02, 0.36e-3), ("none", 11, 0.1e-3))
    ]
    sentence = advice(points, None, None, "perplexity")
    assert sentence.startswith("Choose lists") and "the best on dev, exact" in sentence and "over documents" in sentence
    assert advice([points[0], points[2]], None, None, "perplexity").startswith("Choose exact")
    assert "choose lists" in advice(points, 5e-3, None, "perplexity")


def test_the_subset_of_all_memories_is_the_row_itself(language: SharedRun) -> None:
    results = language.results
    subset_results, metrics = results["subsets"]["subsets"], results["metrics"]
    assert len(subset_results) == 6 and len(subset_results[-1]["memories"]) == 5
    for split, key in (("test", "loss"), ("valid", "valid_loss")):
        assert subset_results[-1][key] == pytest.approx(metrics[split][-1]["loss"], abs=1e-6)
    by_frequency = results["subsets"]["weights"]["vocabulary"]["by_frequency"]
    assert sum(cell["tokens"] for cell in by_frequency[:-1]) == subset_results[0]["tokens"]
    assert sum(one["largest"] for one in results["subsets"]["weights"].values()) == pytest.approx(1)
    read = scored(results)
    with pytest.raises(LookupError, match="far is not among"):
        memory_contribution([read], "far")
    _, (header, lines) = memories_table(read, read.subsets)  # type: ignore[arg-type]
    assert [line[0] for line in lines] == ["vocabulary (the model)", *subset_results[-1]["memories"]]
    assert all(float(line[header.index("MB")]) >= 0 and line[2] for line in lines[1:])


def test_a_frontier_has_each_subset_once(language: SharedRun) -> None:
    other, built = (json.loads(json.dumps(language.results)) for _ in range(2))
    other["subsets"]["external_search"]["k"] = 2
    for store in (built["datastore"], built["datastores"]["external"]):
        store |= {"index": "IVF16_SQ8", "nprobe": 4}
    points = frontier_points([*map(scored, (language.results, other, built))])
    searched = sum("external" in one["memories"] for one in language.results["subsets"]["subsets"])
    assert len(points) == 6 + 2 * searched and sum("IVF16_SQ8, nprobe 4, K" in one.label for one in points) == searched
    assert all(one.seconds > 0 and (one.external is None) == ("external" not in one.memories) for one in points)


@pytest.mark.parametrize("key", ["parameters", "seed", "subsets.mixture", "datastore.entries", "train.updates"])
def test_runs_of_other_models_or_stores_have_a_frontier_of_their_own(language: SharedRun, key: str) -> None:
    results = language.results
    other = json.loads(json.dumps(results))
    *outer, last = key.split(".")
    part = other[outer[0]] if outer else other
    part[last] = "7" if last == "mixture" else 7
    one, two = scored(results), scored(other)
    assert len(group_by_model([one, two])) == 2 and len(group_by_model([one, one])) == 1


def test_a_sweep_reports_its_frontier_beside_other_runs(
    language: SharedRun, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one folder too, which a sweep over settings of what it does not evaluate has."""
    read = read_run(language.folder / "results.json")
    assert isinstance(read, ScoredRun) and read.subsets
    every = read.model_copy(update={"subsets": read.subsets.model_copy(update={"selection": "all"})})
    other = read.model_copy(update={"name": "other", "config_hash": "of other settings"})
    for name, written in {"one": every, "other": other}.items():
        (tmp_path / name).mkdir()
        write_results(tmp_path / name / "results.json", written)
    config = tiny(*language.command("evaluate.subsets=all"), f"paths.outputs={tmp_path}")
    report_sweep(config, [tmp_path / "one"], "python cli.py -m seed=0")
    assert "Pareto fronts of 6" in capsys.readouterr().out
    report_several(config, find_runs([str(tmp_path / "one"), str(tmp_path / "other")]))
    output = capsys.readouterr().out
    assert "Pareto fronts of 6" in output and all(f"\n{name} " in output for name in ("other", "trime_ext"))
