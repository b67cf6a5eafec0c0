"""Which entries stay in a bounded memory, by loops over its definition."""

from __future__ import annotations

import pytest
import torch

from trime.common.types import Ranking
from trime.memory.slots.bounded import keep_best


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize(("size", "new"), [(1, 1), (7, 3), (7, 20), (64, 16), (64, 1), (3, 0)])
@pytest.mark.parametrize("values", [2, 1000])
def test_the_best_entries_stay_in_their_slots_and_new_ones_fill_the_others(
    values: int, size: int, new: int, newest_first: bool
) -> None:
    """Also with many equal scores, empty slots, rows of different length and padding among the new entries."""
    for seed in range(20):
        torch.manual_seed(seed)
        position = torch.stack([torch.randperm(size + new) for _ in range(3)])
        score = torch.randint(values, position.shape).double()
        position[torch.rand(position.shape) < torch.tensor([0.0, 0.2, 0.9])[:, None]] = -1
        score = score.masked_fill(position < 0, -torch.inf)
        attended, clock = torch.rand(3, size) < 0.5, torch.tensor([3, 5, 7])
        old = Ranking(position[:, :size], torch.rand(3, size).double(), attended, clock, 2 * clock)
        entering, column, entries = torch.rand(3, new).double(), torch.rand(3, size), torch.rand(3, new)
        writes, ranking = keep_best(old, position, score, entering, newest_first)
        expected_column, expected = column.clone(), Ranking(*(part.clone() for part in old))
        for row in range(3):
            filled = [number for number in range(size + new) if position[row, number] >= 0]
            age = {number: int(position[row, number]) * (1 if newest_first else -1) for number in filled}
            kept = sorted(filled, key=lambda number: (float(score[row, number]), age[number]), reverse=True)[:size]
            free = [slot for slot in range(size) if slot not in kept]
            for slot, entry in zip(free, [number - size for number in sorted(kept) if number >= size], strict=False):
                expected.position[row, slot], expected.score[row, slot] = position[row, size + entry], entering[row, entry]
                expected.attended[row, slot], expected_column[row, slot] = False, entries[row, entry]
            expected.written[row] += sum(number >= size for number in filled)
        assert all(map(torch.equal, ranking, expected))
        assert torch.equal(writes.apply(column, entries), expected_column)
