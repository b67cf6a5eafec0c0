"""Searches of the external memory: killed builds resume, approximate searches approach exact ones, parts act as one index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.stores import KEYS, QUERY, blocks, built, folder_of, stored
from trime.common.types import Contexts, TokenPosition
from trime.stages.index import open_search
from trime.token_memory.search import faiss_index
from trime.token_memory.search.datastore import Datastore, Keys, KNNMemory, retrieved_mass
from trime.token_memory.search.faiss_index import FaissBuilder, FaissSearch
from trime.token_memory.search.index import build_slices, builder_of, complete_factory, split_cells, split_entries
from trime.token_memory.search.ivf import Cells, IVFSearch
from trime.token_memory.search.search import Blocks, CachedSearch, ExactSearch, merge_results, normalized_blocks, recall_of
from trime.token_memory.search.streaming_topk import StreamingTopK


def broken() -> Iterator[torch.Tensor]:
    """Yield two blocks, then exit as if killed."""
    yield from KEYS.split(700)[:2]
    raise SystemExit(9)


class GivenKeys(Keys):
    """As many keys as KEYS, from blocks instead of shards."""

    def __init__(self, blocks: Blocks):
        self.blocks, self.width, self.first, self.last = blocks, KEYS.shape[1], 0, len(KEYS)


def build(blocks: Blocks, factory: str, metric: str, folder: Path, bar: Mock | None = None) -> None:
    builder, keys = builder_of(factory), GivenKeys(blocks)
    folder.mkdir(exist_ok=True)
    builder.fill(keys, metric, builder.train(keys, metric, folder), folder, bar or Mock())


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
@pytest.mark.parametrize("factory", ["PCA4_IVF4_Flat", "PCAR4_IVF4_Flat"])
def test_fewer_dimensions_keep_similarities(factory: str, metric: str, tmp_path: Path) -> None:
    """Of keys with a common mean, which PCA would subtract, along which they hardly differ."""
    directions = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3)))[0]
    keys = torch.cat([KEYS[:, :3], 0.01 * KEYS[:, 3:] + 4 * torch.eye(5)[0]], 1) @ directions
    build(lambda: iter([keys]), factory, metric, tmp_path)
    found = FaissSearch(tmp_path / "index.faiss", metric, 4).nearest(keys[:50], 20)
    exact = ExactSearch(normalized_blocks(lambda: iter([keys]), metric), metric).nearest(keys[:50], 20)
    assert recall_of(exact[1], found[1]) > 0.9
    torch.testing.assert_close(found[0], exact[0], rtol=0.01, atol=0.05)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("every", [500, 10**6])
@pytest.mark.parametrize("factory", ["Flat", "IVF4_SQ8"])
def test_a_killed_index_resumes(factory: str, every: int, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_index, "SAVED_EVERY", every)
    file, unbroken, bar = tmp_path / "index.faiss", tmp_path / "unbroken", Mock()
    calls = iter([blocks, broken] if factory != "Flat" else [broken])
    with pytest.raises(SystemExit):
        build(lambda: next(calls)(), factory, metric, tmp_path, bar)
    assert FaissSearch(file, metric, 4).index.ntotal == 1400 if every == 500 else not file.exists()
    bar.reset_mock()
    build(blocks, factory, metric, tmp_path, bar)
    build(blocks, factory, metric, unbroken)
    ours, theirs = (FaissSearch(path / "index.faiss", metric, 4).nearest(QUERY, 10) for path in (tmp_path, unbroken))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert sum(call.args[0] for call in bar.update.call_args_list) == len(KEYS)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_flat_index_is_exact_search(metric: str, tmp_path: Path) -> None:
    build(blocks, "Flat", metric, tmp_path)
    flat, exact = FaissSearch(tmp_path / "index.faiss", metric, 1), ExactSearch(blocks, metric, rows=333)
    assert flat.kind == exact.kind == "exact"
    for ours, theirs in zip(flat.nearest(QUERY, 12), exact.nearest(QUERY, 12), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-4)


def test_queries_that_come_twice_are_searched_once() -> None:
    inner = Mock(wraps=ExactSearch(blocks, "ip"), kind="exact")
    once = CachedSearch(inner)
    first, again = once.nearest(QUERY, 5), once.nearest(QUERY.clone(), 5)
    assert torch.equal(first[1], again[1]) and inner.nearest.call_count == 1
    other = once.nearest(QUERY.flip(0), 5)
    assert torch.equal(other[1], first[1].flip(0)) and once.nearest(QUERY, 3)[1].shape == (20, 3)
    assert inner.nearest.call_count == 3


@pytest.mark.parametrize("k", [1, 7, 64, 3000, 3500])
def test_the_largest_of_tiles_are_those_of_all(k: int) -> None:
    """Also where there are fewer than k, and where scores are equal or minus infinity."""
    scores = torch.randn(9, 3000, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    scores[0, 5:] = -torch.inf
    topk = StreamingTopK(9, k)
    for start in range(0, 3000, 333):
        topk.add(scores[:, start : start + 333], start)
    score, number = topk.result()
    number = number.long()
    best = scores.topk(min(k, 3000), 1).values
    assert torch.equal(score[:, :3000], best) and score[:, 3000:].eq(-torch.inf).all()
    present = score > -torch.inf
    assert torch.equal(scores.gather(1, number.clamp(min=0))[present], score[present])
    assert all(len({*row[mask].tolist()}) == mask.sum() for row, mask in zip(number, present, strict=True))
    assert number[0, 5:].eq(-1).all() or k <= 5


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_all_cells_are_exact_search(metric: str, tmp_path: Path) -> None:
    build(blocks, "Cells16", metric, tmp_path)
    exact = ExactSearch(blocks, metric).nearest(QUERY, 40)
    score, number = IVFSearch(tmp_path, metric, 99).nearest(QUERY, 40)
    assert torch.allclose(score, exact[0], atol=1e-4) and recall_of(exact[1], number) > 0.99  # near ties may swap
    shares = [recall_of(exact[1], IVFSearch(tmp_path, metric, nprobe).nearest(QUERY, 40)[1]) for nprobe in (1, 4, 12)]
    assert shares == sorted(shares) and shares[-1] > 0.9 and IVFSearch(tmp_path, metric, 1).kind == "approximate"


def test_a_cell_with_fewer_keys_than_asked_for(tmp_path: Path) -> None:
    build(blocks, "Cells16", "ip", tmp_path)
    score, number = IVFSearch(tmp_path, "ip", 1).nearest(QUERY, 2000)
    missing = number < 0
    assert missing.any(1).all() and torch.equal(missing, score.isinf()) and score[:, :20].isfinite().all()


def test_killed_cells_resume(tmp_path: Path) -> None:
    """Centroids and the cells of each block are reused; the bytes are those of an unbroken build."""
    calls = iter([blocks, broken])
    with pytest.raises(SystemExit):
        build(lambda: next(calls)(), "Cells16", "ip", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"learned.npy", "part-00000.npy", "part-00001.npy"}
    unbroken = tmp_path / "unbroken"
    for folder in (tmp_path, unbroken):
        build(blocks, "Cells16", "ip", folder)
    for name in ("key.npy", "cells.safetensors"):
        assert (tmp_path / name).read_bytes() == (unbroken / name).read_bytes()
    assert {path.name for path in unbroken.iterdir()} == {"key.npy", "cells.safetensors", "learned.npy"}


def test_numbers_missing_in_a_factory_string_are_filled_in() -> None:
    short = "IVF_SQ8 IVF64,PQ8 PCA_IVF_PQ PCA48_IVF_PQ OPQ_IVF_PQ IVF_HNSW32_SQ8"
    whole = "IVF1024_SQ8 IVF64_PQ8 PCA64_IVF1024_PQ32 PCA48_IVF1024_PQ16 OPQ64_IVF1024_PQ64 IVF1024_HNSW32_SQ8"
    for given, factory in zip(short.split(" "), whole.split(" "), strict=True):
        assert complete_factory(given, 10**6, 128) == factory
        builder_of(factory).check(10**6, 128, "ip")
    assert complete_factory("Cells", 10**6, 128) == "Cells1024" and complete_factory(None, 10**6, 128) is None
    assert complete_factory("IVF_Flat", 200, 16) == "IVF5_Flat"


def test_the_mass_of_entries_is_that_of_their_softmax() -> None:
    """At every temperature; with missing entries, without the target, and with a target far below the rest."""
    random = torch.Generator().manual_seed(3)
    score = 20 * torch.randn(50, 300, generator=random)
    token = torch.randint(0, 9, (50, 300), generator=random)
    target, divisor = torch.randint(0, 9, (50,), generator=random), torch.tensor([0.3, 1.0, 8.0])
    score[0], score[1, 5:], target[2], score[3, token[3] == target[3]] = -torch.inf, -torch.inf, 99, -200.0
    mass = retrieved_mass(score, token, target, divisor)
    expected = retrieved_mass(score.double(), token, target, divisor.double())
    for ours, theirs in ((mass.target, expected.target), (mass.total, expected.total)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    assert mass.target[:, 2].eq(-torch.inf).all() and mass.total[:, 0].eq(-torch.inf).all()
    assert mass.target[0, 3] < -600


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
@pytest.mark.parametrize("factory", [None, "IVF16_SQ8", "Flat"])
def test_parts_find_what_one_index_finds(factory: str | None, metric: str, tmp_path: Path) -> None:
    """Parts share centroids and codes, so that the cells that a query visits contain the same keys in any number of parts."""
    store = stored(tmp_path)
    results = [open_search(built(store, count, factory, metric), 3).nearest(QUERY, 30) for count in (1, 3, 7)]
    for score, number in results[1:]:
        assert torch.allclose(score, results[0][0], atol=1e-5) and recall_of(results[0][1], number) == 1


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_cells_of_an_index_find_together_what_it_finds(metric: str, tmp_path: Path) -> None:
    """Every entry is in one part, of about the same size each; queries that visit no cell of a part find nothing there."""
    index = built(stored(tmp_path), 1, "Cells16", metric)[0]
    whole, cells = IVFSearch(index.folder, metric, 3), Cells(index.folder, metric, 3)
    for count in (2, 3, 99):
        parts = split_cells(index, count)
        assert len(parts) == min(count, 16) and [part.first for part in parts[1:]] == [part.last for part in parts[:-1]]
        searches = [part.search(3) for part in parts]
        sizes = [len(search.number) - 1 for search in searches]
        assert sum(sizes) == len(KEYS) and (count > 3 or max(sizes) < 1.5 * len(KEYS) / count)
        found = [search.nearest_in(*cells.visited(QUERY), 30) for search in searches]
        score, number = merge_results(found, [0] * len(parts), 30)
        expected = whole.nearest(QUERY, 30)
        assert torch.allclose(score, expected[0], atol=1e-5) and recall_of(expected[1], number) == 1
    nothing = searches[0].nearest_in(QUERY, torch.full((len(QUERY), 1), parts[0].last), 30)
    assert nothing[0].eq(-torch.inf).all() and nothing[1].eq(-1).all()


def test_numbers_of_large_stores_have_more_than_32_bits() -> None:
    """Parts by rows count from their own first entry."""
    first = 2**31 + 10
    found = [(torch.tensor([[1.0, 0.5]]), torch.tensor([[3, -1]], dtype=torch.int32)) for _ in range(2)]
    assert merge_results(found, [0, first], 2)[1].sort(1)[0].tolist() == [[3, first + 3]]


def test_rescoring_reads_the_keys_of_some_queries_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, none = Datastore.from_tensors(tmp_path / "store", KEYS, torch.arange(len(KEYS))), torch.zeros(len(QUERY)).long()
    memory, query = KNNMemory(store, k=20, rescore=True), Contexts(QUERY, none, TokenPosition(none, none, none))
    whole = memory.entries(query)[0]
    monkeypatch.setattr("trime.token_memory.search.datastore.RESCORED", 20 * QUERY.shape[1] * 7)
    assert torch.equal(memory.entries(query)[0], whole)


def test_a_killed_part_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete parts are reused; the bytes are those of an unbroken build."""
    store, fill = stored(tmp_path), FaissBuilder.fill
    parts = split_entries(store, 3, folder_of(tmp_path / "killed"), "IVF16_SQ8", "ip")

    def killed_at_the_last(builder: FaissBuilder, keys: Keys, *arguments: Any) -> None:
        fill(builder, keys, *arguments) if keys.first < 2000 else broken().throw(SystemExit)

    monkeypatch.setattr(FaissBuilder, "fill", killed_at_the_last)
    with pytest.raises(SystemExit):
        build_slices(parts, tmp_path / "killed", Mock())
    monkeypatch.setattr(FaissBuilder, "fill", fill)
    modified = (parts[0].folder / "index.faiss").stat().st_mtime_ns
    build_slices(parts, tmp_path / "killed", bar := Mock())
    assert (parts[0].folder / "index.faiss").stat().st_mtime_ns == modified
    assert sum(call.args[0] for call in bar.update.call_args_list) == len(KEYS)
    for ours, theirs in zip(parts, built(store, 3, "IVF16_SQ8", "ip"), strict=True):
        assert (ours.folder / "index.faiss").read_bytes() == (theirs.folder / "index.faiss").read_bytes()
