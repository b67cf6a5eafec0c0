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


def test_passes_share_no_state() -> None:
    """Two passes at a time, one that is given up, and another mixture with the same memory and the same Adaptive."""
    long, adaptive = trime.LongMemory([16], trime.FIFO()), trime.Adaptive([1.0], epochs=2)
    one = trime.MemoryMixture({"long": long}, adaptive, folds=3)
    one.fit(windows())
    alone = torch.cat([*one.score(windows())])
    other = trime.MemoryMixture({"long": long, "local": trime.LocalMemory()}, adaptive, folds=3)
    given_up = one.score(windows())
    next(given_up)
    other.fit(windows())
    together = zip(one.score(windows()), one.explain(windows()), other.score(windows()), one.score(windows()), strict=True)
    passes = [torch.cat(parts) for parts in zip(*((a, b, d) for a, (b, _), _, d in together), strict=True)]
    assert all(torch.equal(scores, alone) for scores in passes)
    assert torch.equal(torch.cat([*given_up]), alone[10:])


def test_a_document_may_have_any_number() -> None:
    mixture = trime.MemoryMixture({"local": trime.LocalMemory()}, trime.Adaptive([1.0], epochs=2), folds=3)
    g, logits, targets = torch.randn(9, 8), torch.randn(9, 20), torch.arange(9)
    assert mixture.fit([trime.window_of(g, logits, targets, document=-1)]) > 0


def test_two_folds_are_too_few() -> None:
    with pytest.raises(UserError, match="at least 3"):
        trime.MemoryMixture({"near": trime.LongMemory([16], trime.FIFO())}, folds=2)
