"""The published order of segments and batches, process by process, and the BM25 chains (README sections 4 and 5)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from tests.golden.published import index, parametrized
from trime.data.batching.bm25 import BM25
from trime.data.batching.published import Published, published_chain
from trime.data.segments import Segments, cut

BATCHING, CHAINS = index("misc/batching.json"), index("misc/bm25.json")
RUNS = {run["name"]: run for run in BATCHING.get("runs", [])}


def lengths_of(run: dict[str, Any]) -> np.ndarray:
    """Sizes of all segments: listed, or (size, how many, size of the last one)."""
    sizes = run["segment_sizes"]
    return np.array(sizes if len(sizes) == run["n_segments"] else [sizes[0]] * (sizes[1] - 1) + [sizes[2]])


def batching_of(run: dict[str, Any]) -> Published:
    given = "--predefined-batches" in run["args"]
    order = "bm25" if given else "kept" if "--keep-order" in run["args"] else "shuffled"
    size = run["max_tokens"] // run["tokens_per_sample"] * run["num_shards"]
    settings = {"processes": run["num_shards"], "combined": run["num_comb_shards"]}
    return Published(size, order, run["seed"], multiple=run["required_batch_size_multiple"], **settings)


def filled(parts: list[Any], count: int) -> list[Any]:
    """Each process's batches, empty ones where the others still have some."""
    longest = max(len(part) for part in parts)
    return [[*part, *[[]] * (longest - len(part))] for part in parts][:count]


@parametrized("name", list(RUNS))
def test_batches_of_every_process(name: str) -> None:
    run, batching = RUNS[name], batching_of(RUNS[name])
    lengths = lengths_of(run)
    assert len(lengths) == run["n_segments"]
    order = BATCHING["predefined"] if batching.order == "bm25" else batching.ordered(lengths, None)
    batches = batching.batches(order, lengths)
    assert batches == run["frozen_batches"]
    for epoch, shards in run["per_epoch_per_shard"].items():
        dealt = (
            batching.dealt(batches, int(epoch.removeprefix("epoch")))
            if run["shuffle"] or batching.order == "kept"
            else [batches]
        )
        assert filled(dealt, len(shards)) == filled(shards, len(shards))


@parametrized("name", [name for name, run in RUNS.items() if run["shuffle"] and "--predefined-batches" not in run["args"]])
def test_a_plan_holds_what_the_processes_hold_side_by_side(name: str) -> None:
    run, batching = RUNS[name], batching_of(RUNS[name])
    lengths = lengths_of(run)
    segments = Segments(lengths * 0, lengths * 0, np.cumsum(lengths) - lengths, lengths, lengths * 0)
    for epoch, shards in run["per_epoch_per_shard"].items():
        plan = batching.plan(segments, int(epoch.removeprefix("epoch")) - 1)
        assert plan == [flat(step) for step in zip(*filled(shards, len(shards)), strict=True)]


@parametrized("name", list(CHAINS.get("cases", {})))
def test_chains(name: str) -> None:
    """The published chain drops each list's first entry, takes it for the segment itself, and may hold strings."""
    case = CHAINS["cases"][name]
    lists = [[entry for entry in found[1:] if isinstance(entry, int)] for found in case["retrieval"]]
    assert published_chain(lists, CHAINS["seed"]) == case["order"]


@parametrized("name", list(CHAINS.get("cases", {})))
def test_string_ids_leave_a_shuffle(name: str) -> None:
    case = CHAINS["cases"][name]
    count = len(case["retrieval"])
    table = np.array([[(i + 1) % count] for i in range(count)])
    lengths = np.ones(count, int)
    shuffle = CHAINS["cases"].get("string_docids", {}).get("order")
    published = Published(4, "bm25", CHAINS["seed"], string_ids=True).ordered(lengths, table)
    assert published == (shuffle or published_chain([[]] * count, CHAINS["seed"]))
    chained = Published(4, "bm25", CHAINS["seed"]).ordered(lengths, table)
    start = chained[0]
    assert chained == [(start + i) % count for i in range(count)] != published
    segments = cut(np.array([0, count]), 1)
    apart, together = (BM25(4, 1, 0, string_ids=quirk).plan(segments, 0, table) for quirk in (True, False))
    assert sorted(flat(apart)) == sorted(flat(together)) == list(range(count))
    assert adjacent(together, count) > 0.7 > 0.3 > adjacent(apart, count)


def flat(parts: Iterable[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def adjacent(plan: list[list[int]], count: int) -> float:
    """The share of neighbours in batches that follow each other in the text."""
    pairs = [(one, other) for batch in plan for one, other in pairwise(batch)]
    return sum((one + 1) % count == other for one, other in pairs) / len(pairs)
