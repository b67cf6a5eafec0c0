"""A FAISS index that is killed while it fills goes on from the keys it holds, and answers like an unbroken one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from trime.memory import search
from trime.memory.cells import Cells, build_cells
from trime.memory.datastore import mass_of
from trime.memory.largest import Largest
from trime.memory.search import Exact, Faiss, Once, build_faiss, found_of
from trime.types import UserError

KEYS = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
QUERY = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))


def blocks() -> Iterator[torch.Tensor]:
    yield from KEYS.split(700)


def broken() -> Iterator[torch.Tensor]:
    """Training reads all blocks; the kill comes while the third one is added."""
    yield from KEYS.split(700)[:2]
    raise SystemExit(9)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("every", [500, 10**6])
@pytest.mark.parametrize("factory", ["Flat", "IVF4_SQ8"])
def test_a_killed_index_goes_on(factory: str, every: int, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SAVED_EVERY", every)
    file, whole, bar = tmp_path / "index.faiss", tmp_path / "whole.faiss", Mock()
    calls = iter([blocks, broken] if factory != "Flat" else [broken])
    with pytest.raises(SystemExit):
        build_faiss(lambda: next(calls)(), len(KEYS), 8, factory, metric, file, bar)
    assert Faiss(file, metric, 4).index.ntotal == (1400 if every == 500 else 0)
    bar.reset_mock()
    build_faiss(blocks, len(KEYS), 8, factory, metric, file, bar)
    build_faiss(blocks, len(KEYS), 8, factory, metric, whole, Mock())
    resumed, unbroken = (Faiss(path, metric, 4).nearest(QUERY, 10) for path in (file, whole))
    assert torch.equal(resumed[0], unbroken[0]) and torch.equal(resumed[1], unbroken[1])
    assert sum(call.args[0] for call in bar.update.call_args_list) == len(KEYS)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_flat_index_is_exact_search(metric: str, tmp_path: Path) -> None:
    build_faiss(blocks, len(KEYS), 8, "Flat", metric, tmp_path / "flat.faiss", Mock())
    found, exact = Faiss(tmp_path / "flat.faiss", metric, 1), Exact(blocks, metric, rows=333)
    assert found.kind == exact.kind == "exact"
    for ours, theirs in zip(found.nearest(QUERY, 12), exact.nearest(QUERY, 12), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-4)


def test_queries_that_come_twice_are_searched_once() -> None:
    inner = Mock(wraps=Exact(blocks, "ip"), kind="exact")
    once = Once(inner)
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
    largest = Largest(9, k)
    for start in range(0, 3000, 333):
        largest.take(scores[:, start : start + 333], start)
    found, number = largest.best()
    best = scores.topk(min(k, 3000), 1).values
    assert torch.equal(found[:, :3000], best) and found[:, 3000:].eq(-torch.inf).all()
    there = found > -torch.inf
    assert torch.equal(scores.gather(1, number.clamp(min=0))[there], found[there])
    assert all(len({*row[own].tolist()}) == own.sum() for row, own in zip(number, there, strict=True))
    assert number[0, 5:].eq(-1).all() or k <= 5


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_all_cells_are_exact_search(metric: str, tmp_path: Path) -> None:
    build_cells(blocks, len(KEYS), 8, 16, metric, tmp_path, Mock())
    exact = Exact(blocks, metric).nearest(QUERY, 40)
    found = Cells(tmp_path, metric, 99).nearest(QUERY, 40)
    assert torch.allclose(found[0], exact[0], atol=1e-4) and found_of(exact[1], found[1]) > 0.99  # near ties may swap
    shares = [found_of(exact[1], Cells(tmp_path, metric, probe).nearest(QUERY, 40)[1]) for probe in (1, 4, 12)]
    assert shares == sorted(shares) and shares[-1] > 0.9 and Cells(tmp_path, metric, 1).kind == "approximate"


def test_a_cell_with_fewer_keys_than_asked_for(tmp_path: Path) -> None:
    build_cells(blocks, len(KEYS), 8, 16, "ip", tmp_path, Mock())
    score, number = Cells(tmp_path, "ip", 1).nearest(QUERY, 2000)
    missing = number < 0
    assert missing.any(1).all() and torch.equal(missing, score.isinf()) and score[:, :20].isfinite().all()


def test_killed_cells_go_on(tmp_path: Path) -> None:
    """Centroids, then the cells of each block, are kept; the bytes are those of an unbroken build."""
    calls = iter([blocks, broken])
    with pytest.raises(SystemExit):
        build_cells(lambda: next(calls)(), len(KEYS), 8, 16, "ip", tmp_path, Mock())
    assert {path.name for path in tmp_path.iterdir()} == {"centroid.npy", "cell-00000.npy", "cell-00001.npy"}
    whole = tmp_path / "whole"
    whole.mkdir()
    for folder in (tmp_path, whole):
        build_cells(blocks, len(KEYS), 8, 16, "ip", folder, Mock())
    for name in ("key.npy", "cells.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in whole.iterdir()} == {"key.npy", "cells.safetensors"}


def test_bad_cells_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer cells"):
        build_cells(blocks, len(KEYS), 8, 1024, "ip", tmp_path, Mock())
    build_cells(blocks, len(KEYS), 8, 16, "ip", tmp_path, Mock())
    (tmp_path / "key.npy").write_bytes((tmp_path / "key.npy").read_bytes()[:9000])
    with pytest.raises(UserError, match="run stage datastore"):
        Cells(tmp_path, "ip", 1)


def test_faiss_without_a_device_says_so(tmp_path: Path) -> None:
    build_faiss(blocks, len(KEYS), 8, "Flat", "ip", tmp_path / "flat.faiss", Mock())
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match="faiss-gpu"):
        Faiss(tmp_path / "flat.faiss", "ip", 1, "cuda")


def test_the_mass_of_entries_is_that_of_their_softmax() -> None:
    """Under every temperature; with missing entries, without the target, and with a target far below the rest."""
    random = torch.Generator().manual_seed(3)
    score = 20 * torch.randn(50, 300, generator=random)
    token = torch.randint(0, 9, (50, 300), generator=random)
    target, divisor = torch.randint(0, 9, (50,), generator=random), torch.tensor([0.3, 1.0, 8.0])
    score[0], score[1, 5:], target[2], score[3, token[3] == target[3]] = -torch.inf, -torch.inf, 99, -200.0
    found = mass_of(score, token, target, divisor)
    expected = mass_of(score.double(), token, target, divisor.double())
    for ours, theirs in ((found.target, expected.target), (found.total, expected.total)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    assert found.target[:, 2].eq(-torch.inf).all() and found.total[:, 0].eq(-torch.inf).all()
    assert found.target[0, 3] < -600
