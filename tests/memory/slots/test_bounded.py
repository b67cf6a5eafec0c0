"""What a bounded memory keeps on the CPU is what it keeps elsewhere."""

from __future__ import annotations

import pytest
import torch

from trime.common.types import Ranking
from trime.memory.slots.bounded import SlotWrites, rank_anywhere
from trime.memory.slots.bounded_cpu import rank_on_cpu


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize(("size", "new"), [(1, 1), (7, 3), (7, 20), (64, 16), (64, 1), (3, 0)])
@pytest.mark.parametrize("values", [2, 1000])
def test_the_same_entries_stay_and_enter(values: int, size: int, new: int, newest_first: bool) -> None:
    """Also with many equal scores, empty slots, rows of different length and padding among the new entries."""
    for seed in range(20):
        torch.manual_seed(seed)
        position = torch.stack([torch.randperm(size + new) for _ in range(3)])
        score = torch.randint(values, position.shape).double()
        position[torch.rand(position.shape) < torch.tensor([0.0, 0.2, 0.9])[:, None]] = -1
        score = score.masked_fill(position < 0, -torch.inf)
        attended, clock = torch.rand(3, size) < 0.5, torch.tensor([3, 5, 7])
        old = Ranking(position[:, :size], torch.rand(3, size).double(), attended, clock, 2 * clock)
        given = old, position, score, torch.rand(3, new).double(), newest_first
        writes, expected = rank_anywhere(*given)
        slot, source, found = rank_on_cpu(*given)
        assert all(map(torch.equal, found, expected))
        column, entries = torch.rand(3, size, 2), torch.rand(3, new, 2)
        assert torch.equal(SlotWrites(slot, source, None).apply(column, entries), writes.apply(column, entries))
