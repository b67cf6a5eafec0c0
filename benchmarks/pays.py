"""Our kernels and indices beside a library's, in a call or a stage that users run: code stays where it is 1.3 times faster.

One thread; seconds are of the processor, medians of contestants that take turns. Rows that are not measured now stay in the
file as they were: those of deleted code, and all but ``--only``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numba
import numpy as np
import torch

import trime
from benchmarks.attendre import SIZE, decoder, decoder_like_smollm2, read_with_memory
from benchmarks.measure import Measured
from benchmarks.packing import Bm25s, segments_of
from trime.common.types import Batch, Contexts, LogMass, Tensor, TokenPosition
from trime.config.compose import compose_config
from trime.data.neighbours import BM25
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.layers.attention_cpu import CPUAttention, Reach
from trime.models.backbones import srupp
from trime.models.network import Reader, build_network
from trime.stages.graph import Graph
from trime.token_memory.search.datastore import Datastore, KNNMemory, retrieved_mass
from trime.token_memory.search.faiss_index import use_threads
from trime.token_memory.search.index import build_slices, builder_of, split_cells, split_entries
from trime.token_memory.search.search import ExactSearch, ShardedSearch
from trime.token_memory.similarity import similarity
from trime.token_memory.test.base import Window
from trime.token_memory.test.long import LongMemory
from trime.token_memory.test.ngrams import DocumentNgrams, SuffixArray, TextNgrams
from trime.token_memory.train.objective.blockwise import reference_add_masses

ENOUGH = 1.3  # times faster than the library at some size
GIVEN_UP = ("eviction/weighted_sums", "layers/attention_cpu, to all entries")  # won, and too little for their lines
WORDS, LENGTH, ROWS, K = 20_000, 256, 8, 1024  # vocabulary, tokens of a segment, segments of a batch, entries retrieved
Swap = Callable[[], Any]  # puts the library's way in the place of ours, as long as its context lasts


class Contest(NamedTuple):
    """A user's call with a piece of our code, and with a library in its place."""

    code: str
    library: str
    call: str
    size: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def swapped(code: str, library: str, call: str, size: str, step: Callable[[], Any], swap: Swap) -> Contest:
    """Return the contest of a step with our code, and with that of ``swap`` in its place."""

    def theirs() -> None:
        with swap():
            step()

    return Contest(code, library, call, size, step, theirs)


def zipf_tokens(count: int) -> Tensor:
    """Return words drawn by Zipf's law."""
    return torch.from_numpy(np.random.default_rng(0).zipf(1.3, count) % WORDS)


def segment_batch(length: int) -> Batch:
    """Return a batch of eight segments of words."""
    tokens, zeros, count = zipf_tokens(ROWS * (length + 1)).view(ROWS, -1), torch.zeros(ROWS).long(), torch.arange(ROWS)
    scored = torch.ones(ROWS, length, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:], zeros + length, scored, zeros, count, length * count, zeros > 0)


def update(experiment: str, model: str, length: int, bfloat16: bool = False) -> Callable[[], None]:
    """Return an update of a training: forward, backward, optimiser; ``bfloat16``: models compute in it where they may."""
    config = compose_config(f"experiment={experiment}", f"model={model}", "size=small", "train.plain_share=0")
    module, batch = Graph(config).fit.task.module(build_network(config.model, WORDS)), segment_batch(length)
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = module.losses(batch, 0.5, plain=False)[0].mean()
        loss.backward()
        optimizer.step()

    return step


def training(folder: Path) -> Iterator[Contest]:
    """Yield the kernels of the objective and of SRU++ beside plain PyTorch."""
    plain: Swap = partial(patch, "trime.token_memory.train.objective.blockwise.kernels_for", lambda product: None)
    for model, length in (("tiny", 64), ("small", 2 * LENGTH)):
        size = f"trime_ext, model={model}, {ROWS * length:,} tokens"
        yield swapped("objective/blockwise_cpu", "PyTorch", "training update", size, update("trime_ext", model, length), plain)
    plain = partial(patch, "trime.layers.attention.worth_it", lambda *_: False)
    for bfloat16 in (False, True):
        size = f"vanilla, model=small, {ROWS * 2 * LENGTH:,} tokens, {'bfloat16' if bfloat16 else 'float32'}"
        step = update("vanilla", "small", 2 * LENGTH, bfloat16)
        yield swapped("layers/causal_blocks", "PyTorch", "training update", size, step, plain)
    plain = partial(patch.object, srupp, "recurrence", srupp.by_steps)
    size = f"srupp, model=small, {ROWS * LENGTH:,} tokens"
    yield swapped("backbones/srupp_cpu", "PyTorch", "training update", size, update("srupp", "small", LENGTH), plain)


def plain_attend(
    logits: Tensor, far: Any, query_position: Tensor, key_position: Tensor, value: Tensor, top_k: int, reach: Reach
) -> CPUAttention:
    """Return ``attend`` by PyTorch, for a causal memory without a window in which each query sees something."""
    distance = (query_position[:, :, None] - key_position[:, None])[:, None]
    if far is not None and reach.longest is not None:
        torch.where(distance > reach.longest, far, logits, out=logits)
    logits.masked_fill_((distance < 0) | (key_position < 0)[:, None, None], -torch.inf)
    best, index = logits.topk(min(top_k, logits.shape[-1]), -1)
    weight = torch.zeros_like(logits).scatter_(-1, index, best.softmax(-1))
    attended, shared = value.new_empty(*weight.shape[:3], value.shape[3]), weight.shape[1] // value.shape[2]
    for row, head in itertools.product(range(len(weight)), range(weight.shape[1])):
        torch.mm(weight[row, head], value[row, :, head // shared], out=attended[row, head])
    return CPUAttention(attended, weight > 0)


def reading(folder: Path) -> Iterator[Contest]:
    """Yield the kernel of attention to the best entries of a memory beside plain PyTorch."""
    plain: Swap = partial(patch, "trime.kv.attendre.attend", plain_attend)
    small, wide = ("width 128, 2 layers", decoder("cpu")), ("SmolLM2's shape, 1 layer", decoder_like_smollm2("cpu", 1))
    memory, chunk = Attendre(BoundedMemory(SIZE, trime.LRAMax()), 0, 128, True), 128
    tokens = torch.randint(2, 1000, (1, SIZE + 1024))
    for title, model in (small, wide):
        size = f"{title}, LRAMax, M={SIZE:,}, top-k {memory.top_k}, chunks of {chunk}"
        read = torch.no_grad()(partial(read_with_memory, model, memory, chunk, "flush", tokens))
        yield swapped("layers/attention_cpu", "PyTorch", f"read {tokens.shape[1]:,} tokens", size, read, plain)


def clustered(count: int, width: int) -> Tensor:
    """Return vectors of the length of a layer-normalised g around a thousand centres."""
    drawn = torch.randn(1000, width)[torch.randint(1000, (count,))] + 0.8 * torch.randn(count, width)
    return width**0.5 * drawn / drawn.norm(dim=1, keepdim=True)


class TopKSearch:
    """Exact search by ``torch.topk``."""

    kind = "exact"

    def __init__(self, keys: Any):
        self.keys = keys

    def nearest(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest keys."""
        best, index, start = query.new_full((len(query), k), -torch.inf), torch.full((len(query), k), -1), 0
        for keys in (part for shard in self.keys.blocks() for part in shard.split(2**14)):
            top, where = similarity(query, keys.float(), "ip").topk(k, dim=1)
            best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
            index, start = torch.cat([index, where + start], 1).gather(1, chosen), start + len(keys)
        return best, index


class FaissKNN:
    """Exact search by ``faiss.knn``."""

    kind = "exact"

    def __init__(self, keys: Any):
        self.keys = keys

    def nearest(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest keys."""
        import faiss

        heap, start = faiss.ResultHeap(len(query), k, keep_max=True), 0
        for keys in self.keys.blocks():
            score, number = faiss.knn(query.numpy(), keys.float().numpy(), k, faiss.METRIC_INNER_PRODUCT)
            heap.add_result(score, number + start)
            start += len(keys)
        heap.finalize()
        return torch.from_numpy(heap.D), torch.from_numpy(heap.I)


def plain_mass(score: Tensor, token: Tensor, target: Tensor, divisor: Tensor) -> LogMass:
    """Return ``retrieved_mass`` by PyTorch."""
    scores = score / divisor[:, None, None]
    return LogMass(scores.masked_fill(token != target[:, None], -torch.inf).logsumexp(-1), scores.logsumexp(-1))


def retrieval(folder: Path) -> Iterator[Contest]:
    """Yield the inverted file and the exact search beside FAISS and PyTorch, with a small model that scores the same tokens."""
    use_threads(1)
    torch.manual_seed(0)
    count, width = 200_000, 128
    keys, batch = clustered(count + ROWS * LENGTH, width), segment_batch(LENGTH)
    store = Datastore.from_tensors(folder / "store", keys[:count], zipf_tokens(count))
    config = compose_config("experiment=trime_ext", "size=small")
    reader = Reader(build_network(config.model, WORDS).eval())
    zero, divisor = torch.zeros(ROWS * LENGTH).long(), torch.tensor([*config.tune.temperature]) * width**0.5
    queries = Contexts(keys[count:], batch.targets.flatten(), TokenPosition(zero, zero, zero))

    def score(search: Any, mass: Callable[..., LogMass] = retrieved_mass) -> None:
        with torch.no_grad():
            reader.contexts_and_mass(batch)
        found, token, _ = KNNMemory(store, search, K).entries(queries)
        mass(found, token, queries.token, divisor)

    def opened(factory: str, nprobe: int) -> Any:
        index, builder = folder / factory, builder_of(factory)
        if not index.exists():
            index.mkdir()
            builder.fill(store.keys, "ip", builder.train(store.keys, "ip", index), index, Mock())
        return builder.open(index, "ip", nprobe, "cpu")

    call, tokens = f"score {ROWS * LENGTH:,} tokens", f"{count:,} keys of {width}, K={K:,}"
    for library, nprobe in (("IVF512_Flat", 8), ("IVF512_SQ8", 8), ("IVF512_SQ8", 32)):
        sides = (partial(score, opened(factory, nprobe)) for factory in ("Cells512", library))
        name = f"FAISS {library.replace('_', ',')}"
        yield Contest("retrieval/ivf", name, call, f"{tokens}, {nprobe} of 512 cells visited", *sides)
    exact = partial(score, ExactSearch(store.keys.blocks, "ip"))
    for name, search in (("torch.topk", TopKSearch(store.keys)), ("faiss.knn", FaissKNN(store.keys))):
        yield Contest("retrieval/streaming_topk", name, call, tokens, exact, partial(score, search))
    cells = opened("Cells512", 8)
    size = f"{tokens}, 8 of 512 cells visited, {len(divisor)} temperatures"
    sides = (partial(score, cells, mass) for mass in (retrieved_mass, plain_mass))
    yield Contest("objective, entry_masses", "PyTorch", call, size, *sides)


def division(folder: Path) -> Iterator[Contest]:
    """Yield an inverted file whose parts are cells beside one whose parts hold a share of the keys each."""
    torch.manual_seed(0)
    count, width, queries, number = 200_000, 128, 2048, 4
    keys, places = clustered(count + queries, width), (folder / "store", folder / "whole", folder / "parts")
    Datastore.from_tensors(places[0], keys[:count], zipf_tokens(count))
    built = []
    for parts, place in zip((1, number), places[1:], strict=True):
        place.mkdir()
        built.append(split_entries(places[0], parts, place, "Cells512", "ip"))
        build_slices(built[-1], place, Mock())
    for nprobe in (8, 32):
        by_cells = [part.search(nprobe) for part in split_cells(built[0][0], number)]
        by_keys = ShardedSearch([part.search(nprobe) for part in built[1]], [part.first for part in built[1]])
        sides = (partial(search.nearest, keys[count:], K) for search in (ShardedSearch(by_cells, [0] * len(by_cells)), by_keys))
        size = f"{queries:,} queries, {count:,} keys of {width}, K={K:,}, {nprobe} of 512 cells visited"
        yield Contest("retrieval/ivf, divided by cells", "the same divided by keys", "search in four parts", size, *sides)


def add_rows_plainly(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Any, tiles: Any) -> None:
    """Add a tile to the masses of its rows by PyTorch."""
    scores = product / divisor[:, None, None]
    hit = tiles.query.token[tile.row, None] == tiles.memory.token[None, tile.column]
    reference_add_masses(target, total, scores, tile.visible, hit)


def long_memory(folder: Path) -> Iterator[Contest]:
    """Yield the masses of the last M contexts beside PyTorch, with a small model that scores the same tokens."""
    config = compose_config("experiment=trime_long", "size=small")
    reader = Reader(build_network(config.model, WORDS).eval())
    batch, divisor = segment_batch(LENGTH), torch.tensor([*config.tune.temperature]) * config.model.width**0.5
    place = torch.arange(ROWS * LENGTH)
    contexts = Contexts(
        clustered(len(place), config.model.width), batch.targets.flatten(), TokenPosition(0 * place, 0 * place, place)
    )
    windows = [Window(contexts.take(part), 0, LogMass(part.float(), part.float())) for part in place.split(LENGTH)]

    def score() -> None:
        memory = LongMemory([4096], trime.FIFO())
        with torch.no_grad():
            reader.contexts_and_mass(batch)
            for window in windows:
                memory.mass(window, divisor)
                memory.write(window)

    size = f"M=4,096, {len(divisor)} temperatures"
    plain: Swap = partial(patch, "trime.token_memory.train.objective.blockwise_cpu.add_rows", add_rows_plainly)
    yield swapped("objective, entry_masses", "PyTorch", f"score {len(place):,} tokens", size, score, plain)


def packing(folder: Path) -> Iterator[Contest]:
    """Yield BM25 beside bm25s."""
    for count, length in ((30_000, 64), (100_000, 128)):
        segments, sides = segments_of(None, count, length), []
        for backend in (BM25(), Bm25s()):
            backend.fit(segments)
            sides.append(partial(backend.nearest, list(range(1000, 1100)), 20))
        yield Contest("data/bm25", "bm25s", "stage pack, of 100 segments", f"{count:,} segments of {length} tokens", *sides)


def plain_text_counts(
    text: Any, array: Any, starts: Any, history: Any, first: int, target: Any, orders: Any, of_target: Any, total: Any
) -> None:
    """Fill the counts of ``counts_in_text`` by binary search in NumPy, for all positions at once."""
    padded, separator = np.concatenate([text.astype(np.int64), np.full(orders[-1] + 1, -1)]), len(starts) - 2

    def bound(low: Any, high: Any, tokens: Any, threshold: int) -> Any:
        low, high = low.copy(), high.copy()
        while (is_open := low < high).any():
            middle = (low + high) // 2
            suffix = padded[array[np.minimum(middle, len(array) - 1)][:, None] + np.arange(tokens.shape[1])]
            at = (suffix != tokens).argmax(1)[:, None]
            sign = np.sign(np.take_along_axis(suffix - tokens, at, 1)[:, 0])
            low = np.where(is_open & (sign < threshold), middle + 1, low)
            high = np.where(is_open & (sign >= threshold), middle, high)
        return low

    for number, length in enumerate(orders):
        rows = np.arange(max(0, length - first), len(target))
        context = np.lib.stride_tricks.sliding_window_view(history, length)[first + rows - length]
        low, high = (bound(starts[context[:, 0]], starts[context[:, 0] + 1], context, side) for side in (0, 1))
        for ends, counts, sign in ((target[rows], of_target, 1), (np.full(len(rows), separator), total, -1)):
            longer = np.concatenate([context, ends[:, None]], 1)
            counts[number, rows] += sign * (bound(low, high, longer, 1) - bound(low, high, longer, 0))
        total[number, rows] += high - low


class CountedNgrams(DocumentNgrams):
    """n-grams of the document, counted in a dictionary."""

    def clear(self) -> None:
        super().clear()
        self.counter: Counter[Any] = Counter()

    def count(self, window: Window, target: np.ndarray) -> Any:
        before, added = self.recent_tokens.before(window).tolist(), []
        history, first = before + window.scored.token.tolist(), len(before)
        of_target, total = np.zeros((2, len(self.orders), len(target)), np.int64)
        for i, token in enumerate(target.tolist()):
            for number, order in enumerate(self.orders.tolist()):
                if order > first + i:
                    break
                context = tuple(history[first + i - order : first + i])
                total[number, i], of_target[number, i] = self.counter[context], self.counter[(*context, -1, token)]
                for key in (context, (*context, -1, history[first + i])):
                    self.counter[key] += 1
                    added.append(key)
        return of_target, total, added

    def context_counts(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        self.start_document(window)
        of_target, total, added = self.count(window, window.query.token.numpy())
        self.counter.subtract(added)
        return of_target, total


def ngrams(folder: Path) -> Iterator[Contest]:
    """Yield the counts of n-grams beside NumPy and a dictionary, with a small model that scores the same tokens."""
    reader = Reader(build_network(compose_config("experiment=trime", "size=small").model, WORDS).eval())
    batch, text = segment_batch(LENGTH), zipf_tokens(2_000_000)
    array = SuffixArray.build(text.numpy(), WORDS)
    none, place = torch.zeros(LENGTH), torch.arange(ROWS * LENGTH)
    contexts = Contexts(none[:, None].repeat(ROWS, 1), text[: ROWS * LENGTH], TokenPosition(0 * place, 0 * place, place))
    windows = [Window(contexts.take(part), 0, LogMass(none, none)) for part in place.split(LENGTH)]

    def score(memory: Any) -> None:
        with torch.no_grad():
            reader.contexts_and_mass(batch)
        memory.reset()
        for window in windows:
            memory.experts(window, torch.ones(1))
            memory.write(window)

    call, orders = f"score {ROWS * LENGTH:,} tokens", [1, 2, 3, 4, 6, 8, 12]
    plain: Swap = partial(patch, "trime.token_memory.test.ngrams.counts_in_text", plain_text_counts)
    step = partial(score, TextNgrams(array, [*orders, 16, 24, 32]))
    yield swapped("inference/ngrams_cpu, of a text", "NumPy", call, f"text of {len(text):,} tokens", step, plain)
    sides = (partial(score, memory(orders)) for memory in (DocumentNgrams, CountedNgrams))
    yield Contest("inference/ngrams_cpu, of the document", "dict", call, f"document of {len(place):,} tokens", *sides)


CONTESTS = {part.__name__: part for part in (training, reading, retrieval, division, long_memory, packing, ngrams)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(CONTESTS), default=list(CONTESTS), help="what is measured")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Measure the contests, and keep the other rows of the file."""
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if options.json.exists():
        rows = {key_of(row): row for row in json.loads(options.json.read_text())["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for contest in (contest for name in options.only for contest in CONTESTS[name](Path(folder))):
            row = row_of(contest, options.rounds)
            rows[key_of(row)] = row
    best = {code: max(row["times faster"] for row in rows.values() if row["code"] == code) for code, *_ in rows}
    for row in rows.values():
        row["decision"] = "kept" if best[row["code"]] >= ENOUGH and row["code"] not in GIVEN_UP else "deleted"
    return Measured(list(rows.values()), [])


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what a row is about."""
    return row["code"], row["library"], row["size"]


def row_of(contest: Contest, rounds: int) -> dict[str, Any]:
    """Measure a contest; the first round is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side in ((0, 1), (1, 0))[number % 2]:
            start = time.process_time()
            (contest.ours, contest.theirs)[side]()
            if number:
                seconds[side].append(time.process_time() - start)
    medians = [float(f"{statistics.median(side):.3g}") for side in seconds]
    times = statistics.median(theirs / ours for ours, theirs in zip(*seconds, strict=True))
    row: dict[str, Any] = contest._asdict() | {"ours": medians[0], "theirs": medians[1], "rounds": rounds}
    return row | {"times faster": round(times, 2)}
