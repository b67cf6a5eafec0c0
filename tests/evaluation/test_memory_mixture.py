"""A mixture of memories outside the pipeline: memories of several sizes, and too few folds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import trime
from trime.errors import UserError


def windows() -> Iterator[trime.Window]:
    draw = torch.Generator().manual_seed(0)
    for document in range(6):
        for start in (0, 10, 20):
            g, logits = torch.randn(10, 8, generator=draw), torch.randn(10, 20, generator=draw)
            yield trime.window_of(g, logits, torch.randint(0, 20, (10,), generator=draw), document, start)


def test_memories_may_have_different_sizes() -> None:
    memories = {"near": trime.LongMemory([16], trime.FIFO()), "far": trime.LongMemory([8], trime.LRU(trime.OwnPosition()))}
    mixture = trime.MemoryMixture({**memories}, trime.Adaptive([1.0], epochs=2), folds=3)
    assert mixture.fit(windows()) > 0
    for log_probability, parts in mixture.explain(windows()):
        assert {*parts} == {"vocabulary", "near", "far"}
        torch.testing.assert_close(torch.stack([*parts.values()]).sum(0).float(), log_probability.exp().float())


def test_two_folds_are_too_few() -> None:
    with pytest.raises(UserError, match="at least 3"):
        trime.MemoryMixture({"near": trime.LongMemory([16], trime.FIFO())}, folds=2)
