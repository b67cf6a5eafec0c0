"""Published data: ids, dictionaries, blocks, datastores; the order of segments and batches in every process; BM25 chains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tests.golden.checkpoints import corpus_of, network
from tests.golden.published import assert_near, index, parametrized
from tests.golden.scored import STORES, datastore_arrays
from tests.golden.texts import DATA, corpora, dictionary, ids_of, splits_of, stream
from trime.data.batching.policies import BM25
from trime.data.batching.published import Published, published_chain
from trime.data.segments import Segments, collate, cut
from trime.data.tokenizers import Whitespace
from trime.data.vocabulary import SpecialIds, Vocabulary

SPLITS = [(corpus, split) for corpus in corpora() for split in splits_of(DATA / corpus)]
BATCHING = index("misc/batching.json")
TRAIN = [run for run in BATCHING["runs"] if run["split"] == "train" and run["break_mode"] == "none"]


@parametrized("corpus, split", SPLITS)
def test_ids(corpus: str, split: str) -> None:
    """The published binaries hold our ids, in the dictionary's numbering."""
    text, _ = stream(corpus, split)
    assert ids_of(DATA / corpus, split).tolist() == text.tokens.tolist()


@parametrized("corpus", corpora())
def test_dictionary(corpus: str) -> None:
    """Counting the training text gives the published words in the published order, with the same padding words."""
    counts: Counter[str] = Counter()
    with open(DATA / corpus / "text" / "train.txt", "rb") as file:
        for symbols in Whitespace().tokens(file):
            counts.update(symbols)
    read = dictionary(corpus)
    size = sum(count > 0 for count in read.counts)
    made = Vocabulary.fairseq_from_counts(counts, size + 2, 1)
    assert made.symbols == read.symbols and made.counts[4:] == read.counts[4:]
    assert len(made) % 8 == 0 and made.special_ids == SpecialIds(2, 1) and made.unknown == 3


def corpus_of_batches() -> str:
    """Return the corpus of the published batches: the one with the listed dictionary."""
    special_tokens = BATCHING["special_tokens"]
    head = len(special_tokens["symbols_head"])
    read = {corpus: dictionary(corpus) for corpus in corpora()}
    return next(
        corpus
        for corpus, vocabulary in read.items()
        if vocabulary.symbols[:head] == special_tokens["symbols_head"] and len(vocabulary) == special_tokens["dict_size"]
    )


def test_special_tokens_and_blocks() -> None:
    special_tokens, vocabulary = BATCHING["special_tokens"], dictionary(corpus_of_batches())
    assert (special_tokens["pad"], special_tokens["eos"], special_tokens["unk"]) == (
        vocabulary.special_ids.pad,
        vocabulary.special_ids.eos,
        vocabulary.unknown,
    )
    text, special_ids = stream(corpus_of_batches(), "train")
    segments = cut(text.offsets, TRAIN[0]["tokens_per_sample"])
    for block in BATCHING["train_blocks"]:
        batch = collate(text, segments, [block["id"]], special_ids)
        assert batch.tokens[0].tolist() == block["source"] and batch.targets[0].tolist() == block["target"]


def test_texts_for_bm25() -> None:
    """The published search reads the inputs in the iterator's order; ours reads the targets in the text's order."""
    run = next(run for run in TRAIN if run["shuffle"] and run["num_shards"] == 1 and not run["args"])
    assert BATCHING["bm25_segments_order"] == [segment for batch in run["frozen_batches"] for segment in batch]
    text, special_ids = stream(corpus_of_batches(), "train")
    vocabulary = dictionary(corpus_of_batches())
    segments = cut(text.offsets, run["tokens_per_sample"])
    for segment in BATCHING["bm25_segments_first3"]:
        tokens = collate(text, segments, [segment["id"]], special_ids).tokens[0].tolist()
        assert segment["contents"].split() == [vocabulary.symbols[token] for token in tokens if token != special_ids.eos]


@parametrized("name", list(STORES))
def test_datastore(name: str) -> None:
    """Keys and tokens are those of the training split; the published pass leaves out windows without a full context."""
    store, saved = STORES[name], datastore_arrays(name)
    text, special_ids = stream(corpus_of(store["model"]), store["split"])
    windows, net = cut(text.offsets, store["block"], store["context"]), network(store["model"])
    keys, tokens = [], []
    for number in range(len(windows)):
        batch = collate(text, windows, [number], special_ids)
        with torch.no_grad():
            encoding, _ = net.backbone(batch.tokens, None, None)
        keys.append(encoding.g[batch.scored])
        tokens.append(batch.targets[batch.scored])
    kept = slice(store["first_saved_stream_position"], store["first_saved_stream_position"] + store["size"])
    assert len(text.tokens) == store["stream_tokens"] and len(saved["vals"]) == store["size"]
    assert torch.cat(tokens)[kept].tolist() == saved["vals"].ravel().tolist()
    rounding = torch.finfo(torch.as_tensor(saved["keys"]).dtype).eps / torch.finfo(torch.float32).eps
    assert_near(torch.cat(keys)[kept], saved["keys"], 31 + round(rounding))


BATCHES, CHAINS = index("misc/batching.json"), index("misc/bm25.json")
RUNS = {run["name"]: run for run in BATCHES["runs"]}


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
    order = BATCHES["predefined"] if batching.order == "bm25" else batching.segment_order(lengths, None)
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
