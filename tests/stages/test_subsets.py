"""What each memory is worth: subsets of a fitted mixture's memories, and their weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.results import scored
from tests.helpers.runs import SharedRun
from trime.report.tables import memories_table, memory_contribution
from trime.scoring.meters import Bins, WeightSums, select_memories, token_weights
from trime.scoring.mixtures.experts import ExpertMasses
from trime.stages.subsets import subsets


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
    weights = WeightSums(bins, vocabulary=3)
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
