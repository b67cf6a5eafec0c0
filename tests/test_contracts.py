"""Contracts of every memory that conf/ names: no leak, capacity respected, nothing of the future."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

from tests.conftest import ROOT, composed
from tests.test_laws import ROWS, WORDS, contexts
from trime.memory.in_batch import InBatch
from trime.memory.recent import Recent
from trime.types import Contexts, Mass

MEMORIES = sorted(path.stem for path in (ROOT / "conf" / "memory").glob("*.yaml") if path.stem != "none")
DIVISOR = torch.tensor([1.0], dtype=torch.float64)


def memory_of(name: str) -> InBatch:
    return instantiate(composed(f"memory={name}").memory, _convert_="all")


def for_every_word(memory: InBatch, query: Contexts, seen: Contexts, draw: float) -> torch.Tensor:
    """Evidence [n words] for each word as the target, and in all [n 1]."""
    masses = [memory.evidence(query._replace(token=torch.full_like(query.token, w)), seen, DIVISOR, draw) for w in range(WORDS)]
    return torch.stack([*(mass.target[0] for mass in masses), masses[0].total[0]], 1)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("draw", [0.0, 0.99])
def test_own_target_never_moves_own_evidence(name: str, draw: float) -> None:
    memory, seen = memory_of(name), contexts(1, ROWS)
    before = for_every_word(memory, seen, seen, draw)
    for i in range(len(seen.token)):
        token = seen.token.clone()
        token[i] = (token[i] + 1) % WORDS
        after = for_every_word(memory, seen, seen._replace(token=token), draw)
        assert torch.equal(before[i], after[i])


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "external"])
def test_nothing_later_moves_an_earlier_evidence(name: str) -> None:
    memory, seen = memory_of(name), contexts(2, [(0, 0, 9), (0, 9, 6)])
    before = for_every_word(memory, seen, seen, 1.0)
    for i in range(len(seen.token)):
        token, g = seen.token.clone(), seen.g.clone()
        token[i], g[i] = (token[i] + 1) % WORDS, g[i] + 1
        after = for_every_word(memory, seen, seen._replace(token=token, g=g), 1.0)
        assert torch.equal(before[:i], after[:i])
        assert not torch.equal(before, after) or i == len(seen.token) - 1 or name == "local"


@pytest.mark.parametrize("sizes", [[3], [2, 5]])
@pytest.mark.parametrize("overlap", [0, 4])
def test_recent_holds_no_more_than_its_capacity_and_forgets_the_oldest(sizes: list[int], overlap: int) -> None:
    memory, written = Recent(sizes), contexts(3, [(0, 0, 40)])
    for start in range(0, 40, 4):
        memory.write(written.take(slice(start, start + 4)), overlap)
        assert memory.seen is not None and len(memory.seen.token) <= sizes[-1] + overlap
        assert memory.seen.place.position[-1] == start + 3
        assert (memory.seen.place.position.diff() == 1).all()
    memory.reset()
    empty: Mass = memory.evidence(written.take(slice(0, 2)), DIVISOR)
    assert empty.total.shape == (len(sizes), 1, 2) and empty.total.isinf().all()


def test_recent_is_bounded_by_documents_unless_crossing() -> None:
    before, query = contexts(4, [(0, 0, 8)]), contexts(5, [(1, 0, 3)])
    for crossing in (False, True):
        memory = Recent([8], crossing)
        memory.write(before)
        assert memory.evidence(query, DIVISOR).total.isfinite().all() == crossing


def test_one_entry_in_two_windows_counts_once_unless_repeats() -> None:
    """The window holds its context itself: the memory passes over the entries that are both."""
    whole = contexts(6, [(0, 0, 8)])
    query = whole.take(slice(6, 8))
    for repeats, held in ((False, 3), (True, 6)):
        memory = Recent([100], repeats=repeats)
        memory.write(whole.take(slice(0, 6)))
        alone = Recent([100])
        alone.write(whole.take(slice(0, held)))
        assert torch.equal(memory.evidence(query, DIVISOR, overlap=3).total, alone.evidence(query, DIVISOR).total)
