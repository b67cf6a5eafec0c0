"""A FAISS index that is killed while it fills goes on from the keys it holds, and answers like an unbroken one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from trime.memory import search
from trime.memory.search import Exact, Faiss, Once, build_faiss

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
