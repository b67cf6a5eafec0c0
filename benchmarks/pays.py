"""Each kernel and index of our own beside what a library gives, in a whole stage or call of a user: is it 1.3 times faster?

One thread, processor time, contestants take turns. A row keeps the times, how often ours is faster, and the decision. Rows of
code that was deleted, and of contests that are not run now, stay in the file as they were measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numba
import numpy as np
import torch

import trime
from benchmarks.attendre import decoder, decoder_like_smollm2, read_with_memory
from benchmarks.cache import feed
from benchmarks.measure import ROOT, Measured
from trime.common.types import Contexts, TokenPosition
from trime.config.compose import compose_config
from trime.common.types import Batch
from trime.models.network import build_network
from trime.stages.training_task import training_parts
from trime.training.language_model import LanguageModel
from trime.memory.slots.bounded import BoundedMemory
from trime.memory.slots.eviction.initial import BelowMean
from trime.memory.slots.eviction.score_transform import Raw
from trime.models.pretrained.attendre import Attendre

ENOUGH = 1.3  # times faster than the library, at some size, for code to stay


class Contest(NamedTuple):
    """A user's call with a piece of our code, and with ``library`` in its place."""

    code: str
    library: str
    call: str
    size: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Return the processor seconds of both sides in each round, after one that is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side in ((0, 1), (1, 0))[number % 2]:
            start = time.process_time()
            (ours, theirs)[side]()
            if number:
                seconds[side].append(time.process_time() - start)
    return seconds


# ---- trainings
def training(code: str, library: str, experiment: str, model: str, length: int, plain: Callable[[], Any]) -> Contest:
    config = compose_config(f"experiment={experiment}", f"model={model}", "size=small", "logger=none", "train.plain_share=0")
    words = 20_000 if model != "7m" else 100_000
    module = LanguageModel(build_network(config.model, words), *training_parts(config))
    optimizer, zeros, count = torch.optim.AdamW(module.parameters()), torch.zeros(8, dtype=torch.long), torch.arange(8)
    tokens = torch.from_numpy(np.random.default_rng(0).zipf(1.3, (8, length + 1)) % words)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], zeros + length, torch.ones(8, length, dtype=torch.bool), zeros, count, length * count, zeros > 0)

    def update(swap: Callable[[], Any]) -> None:
        with swap():
            optimizer.zero_grad()
            module.losses(batch, 0.5, False)[0].mean().backward()
            optimizer.step()

    size = f"{experiment}, model={model}, {8 * length:,} tokens"
    return Contest(code, library, "an update of the training", size, partial(update, nullcontext), partial(update, plain))


def objective(folder: Path) -> Iterator[Contest]:
    plain = partial(patch, "trime.memory.training.objective.blockwise.kernels_for", lambda product: None)
    for model, length in (("tiny", 64), ("small", 512), ("7m", 512), ("7m", 3072)):
        yield training("objective/blockwise_cpu", "PyTorch", "trime_ext", model, length, plain)
    yield training("objective/blockwise_cpu", "PyTorch", "trime_long", "small", 512, plain)
    yield training("objective/blockwise_cpu", "PyTorch", "trime", "small", 512, plain)


def recurrence(folder: Path) -> Iterator[Contest]:
    from trime.models.backbones import srupp

    plain = partial(patch.object, srupp, "recurrence", srupp.by_steps)
    yield training("backbones/srupp_cpu", "PyTorch", "srupp", "small", 512, plain)


# ---- long contexts
def reading(code: str, library: str, plain: Callable[[], Any], policies: dict[str, Any]) -> Iterator[Contest]:
    for title, model in (("width 128, 2 layers", decoder("cpu")), ("SmolLM2's shape, 1 layer", decoder_like_smollm2("cpu", 1))):
        for name, (policy, top_k, chunk) in policies.items():
            tokens = torch.randint(2, 1000, (1, 4096))
            memory = Attendre(BoundedMemory(2048, policy), 0, top_k, True)

            def read(swap: Any, model: Any = model, memory: Any = memory, tokens: Any = tokens, chunk: int = chunk) -> None:
                with torch.no_grad(), swap():
                    read_with_memory(model, memory, chunk, "flush", tokens)

            size = f"{title}, {name}, M=2,048, top_k={top_k}, chunk={chunk}"
            yield Contest(code, library, "read 4,096 tokens", size, partial(read, nullcontext), partial(read, plain))


def policies() -> dict[str, Any]:
    return {
        "lra_max": (trime.LRAMax(BelowMean(2.0), Raw()), 128, 128),
        "lra_sum": (trime.LRASum(BelowMean(2.0), Raw()), None, 512),
    }


def attention(folder: Path) -> Iterator[Contest]:
    plain = partial(patch, "trime.models.pretrained.attendre.runs_on_cpu", lambda *tensors: False)
    yield from reading("layers/attention_cpu", "PyTorch", plain, policies() | {"fifo": (trime.FIFO(), None, 512)})


def softmax(folder: Path) -> Iterator[Contest]:
    from trime.models.layers import attention_cpu as a
    import itertools

    def plain(logits: Any, far: Any, query_position: Any, key_position: Any, value: Any, top_k: Any, reach: Any) -> Any:
        assert top_k is None
        b, h, q, m = logits.shape
        distance = query_position[:, :, None] - key_position[:, None]
        hidden = (key_position < 0)[:, None] | (query_position < 0)[:, :, None]
        if reach.causal:
            hidden = hidden | (distance < 0)
        if reach.window is not None:
            hidden = hidden | (distance.abs() >= reach.window)
        if far is not None and reach.longest is not None:
            torch.where((distance > reach.longest)[:, None], far, logits, out=logits)
        logits.masked_fill_(hidden[:, None], -torch.inf)
        weight = logits.softmax(-1)
        empty = hidden.all(-1)
        if empty.any():
            weight.masked_fill_(empty[:, None, :, None], 0.0)
        out = logits.new_empty(b, q, h, value.shape[3])
        for row, head in itertools.product(range(b), range(h)):
            torch.mm(weight[row, head], value[row, :, head // (h // value.shape[2])], out=out[row, :, head])
        return a.CPUAttention(out.transpose(1, 2), None)

    swap = partial(patch, "trime.models.pretrained.attendre.attend", plain)
    chosen = {"lra_sum": (trime.LRASum(BelowMean(2.0), Raw()), None, 512), "fifo": (trime.FIFO(), None, 512), "fifo ": (trime.FIFO(), None, 128)}
    yield from reading("layers/attention_cpu softmax", "PyTorch", swap, chosen)


def ranking_swap() -> Any:
    from trime.memory.slots import bounded

    class Plain(BoundedMemory):
        pass

    def plan(self: Any, old: Any, columns: Any, position: Any) -> Any:
        score = self.policy.enter(columns, old, position).masked_fill(position < 0, -torch.inf)
        candidates = torch.cat([old.position, position], 1)
        competing = self.policy.compete(candidates, torch.cat([old.score, score], 1), self.size)
        return bounded.rank_anywhere(old, candidates, competing, score, self.policy.newest_first)

    return patch.object(BoundedMemory, "plan", plan)


def ranking(folder: Path) -> Iterator[Contest]:
    code, library = "slots/bounded_cpu", "PyTorch"
    yield from reading(code, library, ranking_swap, policies() | {"fifo": (trime.FIFO(), None, 512)})
    import copy

    for layers, vocabulary, size in ((4, 1000, 512), (4, 1000, 4096)):
        model = decoder_like_smollm2("cpu", layers, vocabulary)
        tokens = torch.randint(2, vocabulary, (1, 2 * size))
        for name, policy in (("fifo", trime.FIFO()), ("h2o", trime.H2O(trime.Softmax())), ("tova", trime.TOVA(trime.Softmax()))):
            cache = trime.EvictingCache(model, size, policy)
            feed(model, cache, tokens, 2 * size)

            def decode(swap: Any, model: Any = model, cache: Any = cache, tokens: Any = tokens) -> None:
                with swap():
                    feed(model, copy.deepcopy(cache), tokens[:, :32], 1)

            yield Contest(code, library, "EvictingCache: 32 tokens", f"{layers} layers, {name}, M={size}", partial(decode, nullcontext), partial(decode, ranking_swap))


def sums_swap() -> Any:
    def plain(block: Any, importance: Any, weight: Any) -> Any:
        seen = importance.masked_fill(block.score == -torch.inf, 0.0).flatten(1, 2)
        factors = weight.float().repeat(1, importance.shape[1])[:, None]
        return (factors @ seen).squeeze(1).double(), block.score.amax((1, 2)) > -torch.inf

    from contextlib import ExitStack

    stack = ExitStack()
    stack.enter_context(patch("trime.memory.slots.eviction.lfa.weighted_sums", plain))
    stack.enter_context(patch("trime.memory.slots.eviction.lra_sum.weighted_sums", plain))
    return stack


def sums(folder: Path) -> Iterator[Contest]:
    chosen = {name: policy for name, policy in policies().items() if name in ("lra_sum", "lfa")}
    chosen |= {"lra_sum ": (trime.LRASum(BelowMean(2.0), Raw()), 128, 128)}
    yield from reading("eviction/weighted_sums", "PyTorch", sums_swap, chosen)


# ---- datastores
def clustered(count: int, width: int, queries: int) -> tuple[Any, Any]:
    """Return keys of a length like a layer's normalised g around 1,000 centres, and queries like them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, width, generator=generator)
    def draw(n: int) -> Any:
        x = centres[torch.randint(1000, (n,), generator=generator)] + 0.8 * torch.randn(n, width, generator=generator)
        return width**0.5 * x / x.norm(dim=1, keepdim=True)
    return draw(count), draw(queries)


def external(folder: Path) -> Iterator[Contest]:
    from trime.memory.retrieval.datastore import Datastore, KNNMemory, retrieved_mass
    from trime.memory.retrieval.index import builder_of
    from trime.memory.retrieval.search import recall_of, ExactSearch
    from trime.memory.retrieval import datastore as d
    from unittest.mock import Mock
    import faiss
    faiss.omp_set_num_threads(1)
    config = compose_config("experiment=trime_ext", "model=small", "size=small")
    network = build_network(config.model, 20_000).eval()
    from trime.models.network import Reader
    for count, width in ((200_000, 128), (500_000, 128)):
        keys, queries = clustered(count, width, 4096)
        tokens = torch.from_numpy(np.random.default_rng(0).zipf(1.3, count) % 20000)
        store = Datastore.from_tensors(folder / f"store{count}-{width}", keys, tokens)
        zero = torch.zeros(len(queries), dtype=torch.long)
        contexts = Contexts(queries, tokens[:len(queries)], TokenPosition(zero, zero, zero))
        text = torch.from_numpy(np.random.default_rng(0).zipf(1.3, (8, 513)) % 20_000)
        zeros = torch.zeros(8, dtype=torch.long)
        batch_ = Batch(text[:, :-1], text[:, 1:], zeros + 512, torch.ones(8, 512, dtype=torch.bool), zeros, torch.arange(8), 512 * torch.arange(8), zeros > 0)
        cells = 512 if count < 500_000 else 1024
        divisor = torch.tensor([0.5, 1.0, 2.0]) * width**0.5
        exact = None
        if count < 500_000:
            exact = ExactSearch(store.keys.blocks, "ip").nearest(queries[:200], 1024)[1]
        def masses(memory: Any, n: int) -> Any:
            with torch.no_grad():
                Reader(network).contexts_and_mass(batch_)
            part = contexts.take(slice(0, n))
            score, token, _ = memory.entries(part)
            return retrieved_mass(score, token, part.token, divisor)
        searches = {}
        for factory in (f"Cells{cells}", f"IVF{cells}_Flat", f"IVF{cells}_SQ8", f"IVF{cells}_SQfp16"):
            index = folder / f"{factory}-{count}-{width}"
            index.mkdir()
            builder = builder_of(factory)
            start = time.process_time()
            trained = builder.train(store.keys, "ip", index)
            builder.fill(store.keys, "ip", trained, index, Mock())
            built = time.process_time() - start
            for probe in (8, 32):
                search = builder.open(index, "ip", probe, "cpu")
                found = recall_of(exact, search.nearest(queries[:200], 1024)[1]) if exact is not None else None
                print(factory, probe, "build", round(built, 1), "recall", found, flush=True)
                searches[factory.strip("0123456789"), probe] = KNNMemory(store, search, 1024)
        own = [memory for name, memory in searches.items() if name[0] == "Cells"]
        for (name, probe), memory in searches.items():
            if name == "Cells": continue
            for batch in (4096,):
                ours = searches["Cells", probe]
                yield Contest("retrieval/ivf", f"FAISS {name}", "score 4,096 tokens", f"{count:,} keys of {width}, nprobe={probe}, {batch} queries", partial(masses, ours, batch), partial(masses, memory, batch))


def exact(folder: Path) -> Iterator[Contest]:
    from trime.memory.retrieval.datastore import Datastore, KNNMemory, retrieved_mass
    from trime.memory.retrieval.search import ExactSearch
    from trime.memory.similarity import similarity
    import faiss
    faiss.omp_set_num_threads(1)

    class Plain:
        kind = "exact"
        def __init__(self, blocks: Any, rows: int): self.blocks, self.rows = blocks, rows
        def nearest(self, query: Any, k: int) -> Any:
            best = query.new_full((len(query), k), -torch.inf)
            index = torch.full((len(query), k), -1, dtype=torch.long)
            start = 0
            for shard in self.blocks():
                for keys in shard.split(self.rows):
                    top, where = similarity(query, keys.float(), "ip").topk(min(k, len(keys)), dim=1)
                    best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
                    index = torch.cat([index, where + start], 1).gather(1, chosen)
                    start += len(keys)
            return best, index

    class Flat:
        kind = "exact"
        def __init__(self, blocks: Any): self.blocks = blocks
        def nearest(self, query: Any, k: int) -> Any:
            heap = faiss.ResultHeap(len(query), k, keep_max=True)
            start = 0
            for shard in self.blocks():
                for keys in shard.split(2**17):
                    D, I = faiss.knn(query.numpy(), keys.float().numpy(), k, faiss.METRIC_INNER_PRODUCT)
                    heap.add_result(D, I + start)
                    start += len(keys)
            heap.finalize()
            return torch.from_numpy(heap.D), torch.from_numpy(heap.I)

    for count, width in ((100_000, 128), (100_000, 512)):
        keys, queries = clustered(count, width, 2048)
        tokens = torch.from_numpy(np.random.default_rng(0).zipf(1.3, count) % 20000)
        store = Datastore.from_tensors(folder / f"exact{count}-{width}", keys, tokens)
        zero = torch.zeros(len(queries), dtype=torch.long)
        contexts = Contexts(queries, tokens[:len(queries)], TokenPosition(zero, zero, zero))
        divisor = torch.tensor([0.5, 1.0, 2.0]) * width**0.5
        def masses(memory: Any, n: int, mass: Any = retrieved_mass) -> Any:
            part = contexts.take(slice(0, n))
            score, token, _ = memory.entries(part)
            return mass(score, token, part.token, divisor)
        def plain_mass(score: Any, token: Any, target: Any, divisor: Any) -> Any:
            scores = score / divisor[:, None, None]
            return scores.masked_fill(token != target[:, None], -torch.inf).logsumexp(-1), scores.logsumexp(-1)
        ours = KNNMemory(store, ExactSearch(store.keys.blocks, "ip"), 1024)
        others = {"PyTorch topk, 16k": Plain(store.keys.blocks, 2**14), "PyTorch topk, 64k": Plain(store.keys.blocks, 2**16), "FAISS knn": Flat(store.keys.blocks)}
        for name, other in others.items():
            for batch in (512, 2048):
                yield Contest("retrieval/streaming_topk", name, "masses of windows", f"{count:,} keys of {width}, {batch} queries", partial(masses, ours, batch), partial(masses, KNNMemory(store, other, 1024), batch))
        yield Contest("objective/blockwise_cpu entry_masses", "PyTorch", "masses of windows", f"{count:,} keys of {width}, {batch} queries", partial(masses, ours, 2048), partial(masses, ours, 2048, plain_mass))


def bm25(folder: Path) -> Iterator[Contest]:
    from benchmarks.packing import Bm25s, segments_of
    from trime.data.neighbours import Fast
    import copy
    for count, length in ((100_000, 128), (30_000, 64)):
        segments = segments_of(None, count, length)
        sides = []
        for backend in (Fast(), Bm25s()):
            start = time.process_time()
            backend.fit(segments)
            print("fit", time.process_time() - start, flush=True)
            sides.append(partial(backend.nearest, list(range(1000, 1100)), 20))
        yield Contest("data/bm25", "bm25s", "100 queries of the stage pack", f"{count:,} segments of {length}", *sides)


CONTESTS = {"objective": objective, "recurrence": recurrence, "attention": attention, "softmax": softmax, "ranking": ranking, "external": external, "exact": exact, "bm25": bm25, "sums": sums}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(CONTESTS), default=list(CONTESTS))
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            for contest in CONTESTS[name](Path(folder)):
                ours, theirs = turns(contest.ours, contest.theirs, options.rounds)
                row = {
                    "code": contest.code, "library": contest.library, "call": contest.call, "size": contest.size,
                    "ours s": float(f"{statistics.median(ours):.3g}"),
                    "library s": float(f"{statistics.median(theirs):.3g}"),
                    "times faster": round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 2),
                }
                print(row, flush=True)
                rows.append(row)
    return Measured(rows, [])
