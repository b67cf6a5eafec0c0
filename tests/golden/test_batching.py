"""The published order of segments and batches in every process, and the BM25 chains (misc/)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from tests.golden.published import index, parametrized
from trime.data.batching.policies import BM25
from trime.data.batching.published import Published, published_chain
from trime.data.segments import Segments, cut

BATCHING, CHAINS = index("misc/batching.json"), index("misc/bm25.json")
RUNS = {run["name"]: run for run in BATCHING["runs"]}


def lengths_of(run: dict[str, Any]) -> np.ndarray:
    """Return the sizes of all segments; fixed cuts are stored as size, number, and size of the last one."""
    sizes = run["segment_sizes"]
    return np.array([sizes[0]] * (sizes[1] - 1) + [sizes[2]] if run["break_mode"] == "none" else sizes)


def batching_of(run: dict[str, Any]) -> Published:
    is_predefined = "--predefined-batches" in run["args"]
    order = "bm25" if is_predefined else "kept" if "--keep-order" in run["args"] else "shuffled"
    size = run["max_tokens"] // int(lengths_of(run).max()) * run["num_shards"]
    settings = {"processes": run["num_shards"], "combined": run["num_comb_shards"]}
    return Published(size, order, run["seed"], multiple=run["required_batch_size_multiple"], **settings)


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return [number for part in parts for number in part]


def pad_shards(parts: list[Any], count: int) -> list[Any]:
    """Return each process's batches, padded with empty ones to the same number."""
    longest = max(len(part) for part in parts)
    return [[*part, *[[]] * (longest - len(part))] for part in parts][:count]


@parametrized("name", list(RUNS))
def test_batches_of_every_process(name: str) -> None:
    run, batching = RUNS[name], batching_of(RUNS[name])
    lengths = lengths_of(run)
    assert len(lengths) == run["n_segments"]
    order = BATCHING["predefined"] if batching.order == "bm25" else batching.segment_order(lengths, None)
    batching.size = run["num_shards"]  # room for one segment of max_tokens in each process: whole lines may all be short
    batches = batching.batches(order, np.append(lengths, run["max_tokens"]))
    assert batches == run["frozen_batches"]
    for epoch, shards in run["per_epoch_per_shard"].items():
        dealt = (
            batching.distribute(batches, int(epoch.removeprefix("epoch")))
            if run["shuffle"] or batching.order == "kept"
            else [batches]
        )
        assert pad_shards(dealt, len(shards)) == pad_shards(shards, len(shards))


@parametrized("name", [name for name, run in RUNS.items() if run["shuffle"] and "--predefined-batches" not in run["args"]])
def test_a_plan_holds_what_the_processes_hold_side_by_side(name: str) -> None:
    run, batching = RUNS[name], batching_of(RUNS[name])
    lengths = lengths_of(run)
    segments = Segments(lengths * 0, lengths * 0, np.cumsum(lengths) - lengths, lengths, lengths * 0)
    for epoch, shards in run["per_epoch_per_shard"].items():
        plan = batching.plan(segments, int(epoch.removeprefix("epoch")) - 1)
        assert plan == [flat(step) for step in zip(*pad_shards(shards, len(shards)), strict=True)]


@parametrized("name", list(CHAINS["cases"]))
def test_chains(name: str) -> None:
    """The published chain drops each list's first entry, which it assumes to be the segment itself, and may hold strings."""
    case = CHAINS["cases"][name]
    lists = [[entry for entry in retrieved[1:] if isinstance(entry, int)] for retrieved in case["retrieval"]]
    assert published_chain(lists, CHAINS["seed"]) == case["order"]


STRINGS = [name for name, case in CHAINS["cases"].items() if any(isinstance(entry, str) for entry in flat(case["retrieval"]))]


@parametrized("name", STRINGS)
def test_string_ids_leave_a_shuffle(name: str) -> None:
    """The published search's strings never match a segment's number, whatever the neighbours are."""
    order = CHAINS["cases"][name]["order"]
    count = len(order)
    table = np.array([[(i + 1) % count] for i in range(count)])
    assert Published(4, "bm25", CHAINS["seed"], string_ids=True).segment_order(np.ones(count, int), table) == order
    chained = Published(4, "bm25", CHAINS["seed"]).segment_order(np.ones(count, int), table)
    assert chained == [(chained[0] + i) % count for i in range(count)] != order


def test_string_ids_part_neighbours() -> None:
    """Our BM25 batches hold neighbours, except with the setting for the published quirk."""
    count = 200
    table = np.array([[(i + 1) % count] for i in range(count)])
    segments = cut(np.array([0, count]), 1)
    apart, together = (BM25(4, 1, 0, string_ids=quirk).plan(segments, 0, table) for quirk in (True, False))
    assert sorted(flat(apart)) == sorted(flat(together)) == list(range(count))
    assert adjacent(together, count) > 0.7 > 0.3 > adjacent(apart, count)


def adjacent(plan: list[list[int]], count: int) -> float:
    """Return the share of consecutive batch rows that follow each other in the text."""
    pairs = [(one, other) for batch in plan for one, other in pairwise(batch)]
    return sum((one + 1) % count == other for one, other in pairs) / len(pairs)
