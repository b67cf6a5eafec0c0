"""Contracts of every memory that conf/ names: no leak, capacity respected, nothing of the future."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

from tests.conftest import ROOT, composed
from tests.helpers.laws import ROWS, WORDS, contexts
from trime.common.types import Contexts, LogMass
from trime.kv.eviction.fifo import FIFO
from trime.kv.eviction.initial import Constant
from trime.kv.eviction.lra_sum import LRASum
from trime.kv.eviction.score_transform import Raw
from trime.token_memory.test.evicting import EvictingTokenMemory, FifoTokenMemory
from trime.token_memory.train.in_batch import InBatch

MEMORIES = sorted(path.stem for path in (ROOT / "conf" / "memory").glob("*.yaml") if path.stem != "none")
DIVISOR = torch.tensor([1.0], dtype=torch.float64)


def memory_of(name: str) -> InBatch:
    return instantiate(composed(f"memory={name}").memory, _convert_="all")


def for_every_word(memory: InBatch, query: Contexts, batch: Contexts, draw: float | None) -> torch.Tensor:
    """The masses [n words] for each word as the target, and in all [n 1]."""
    masses = [memory.mass(query._replace(token=torch.full_like(query.token, w)), batch, DIVISOR, draw) for w in range(WORDS)]
    return torch.stack([*(mass.target[0] for mass in masses), masses[0].total[0]], 1)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("draw", [0.0, 0.99])
def test_own_target_never_moves_own_mass(name: str, draw: float) -> None:
    memory, batch = memory_of(name), contexts(1, ROWS)
    before = for_every_word(memory, batch, batch, draw)
    for i in range(len(batch.token)):
        token = batch.token.clone()
        token[i] = (token[i] + 1) % WORDS
        after = for_every_word(memory, batch, batch._replace(token=token), draw)
        assert torch.equal(before[i], after[i])


@pytest.mark.parametrize("name", [name for name in MEMORIES if name not in ("external", "sentences", "drawn")])
def test_nothing_later_moves_an_earlier_mass(name: str) -> None:
    memory, batch = memory_of(name), contexts(2, [(0, 0, 9), (0, 9, 6)])
    before = for_every_word(memory, batch, batch, None)
    for i in range(len(batch.token)):
        token, g = batch.token.clone(), batch.g.clone()
        token[i], g[i] = (token[i] + 1) % WORDS, g[i] + 1
        after = for_every_word(memory, batch, batch._replace(token=token, g=g), None)
        assert torch.equal(before[:i], after[:i])
        assert not torch.equal(before, after) or i == len(batch.token) - 1 or name == "local"


@pytest.mark.parametrize("sizes", [[3], [2, 5]])
@pytest.mark.parametrize("overlap", [0, 4])
def test_recent_holds_no_more_than_its_capacity_and_forgets_the_oldest(sizes: list[int], overlap: int) -> None:
    memory, written = FifoTokenMemory(sizes), contexts(3, [(0, 0, 40)])
    for start in range(0, 40, 4):
        memory.write(written.take(slice(start, start + 4)), keep_extra=overlap)
        assert memory.contexts is not None and len(memory.contexts.token) <= sizes[-1] + overlap
        assert memory.contexts.positions.position[-1] == start + 3
        assert (memory.contexts.positions.position.diff() == 1).all()
    memory.reset()
    empty: LogMass = memory.mass(written.take(slice(0, 2)), DIVISOR)
    assert empty.total.shape == (len(sizes), 1, 2) and empty.total.isinf().all()


def test_recent_is_bounded_by_documents_unless_across_documents() -> None:
    before, query = contexts(4, [(0, 0, 8)]), contexts(5, [(1, 0, 3)])
    for across_documents in (False, True):
        memory = FifoTokenMemory([8], across_documents)
        memory.write(before)
        assert memory.mass(query, DIVISOR).total.isfinite().all() == across_documents


@pytest.mark.parametrize("overlap", [0, 4])
@pytest.mark.parametrize("include_window", [False, True])
def test_selective_memory_by_age_is_the_recent_one(overlap: int, include_window: bool) -> None:
    """First in, first out keeps the last entries: windows with context of their own, over a document's border."""
    recent, selective = (
        FifoTokenMemory([5, 12], include_window=include_window),
        EvictingTokenMemory([5, 12], FIFO(), include_window=include_window),
    )
    for document in (0, 1):
        whole = contexts(7 + document, [(document, 0, 40)])
        for start in range(0, 40, 4):
            query, own = whole.take(slice(start, start + 4)), min(start, overlap)
            one, other = (memory.mass(query, DIVISOR, overlap=own) for memory in (recent, selective))
            torch.testing.assert_close(one.total, other.total, rtol=0, atol=1e-12)
            torch.testing.assert_close(one.target, other.target, rtol=0, atol=1e-12)
            recent.write(query, keep_extra=overlap + 4)
            selective.write(query, overlap=own)


def test_selective_memory_keeps_what_received_mass() -> None:
    """By the sum of mass: entries that every query resembles stay, though others are newer."""
    memory = EvictingTokenMemory([3], LRASum(Constant(0.0), Raw()))
    whole = contexts(9, [(0, 0, 30)])
    wanted = whole.g[3].clone()
    g = 0.01 * whole.g + 0.1 * wanted
    g[3] = 100 * wanted
    for start in range(0, 20, 4):
        memory.write(whole._replace(g=g).take(slice(start, start + 4)))
    assert memory.content.states
    ranking = memory.content.states[0].ranking
    assert 3 in ranking.position[0].tolist()
    mass = ranking.score[0, ranking.position[0] == 3]
    assert 3.5 < float(mass) <= 4.0  # four queries, nearly all of their mass


@pytest.mark.parametrize("overlap", [0, 3])
def test_queries_do_not_change_what_an_evicting_memory_keeps(overlap: int) -> None:
    """``write`` alone updates the scores: queries in between, of this or another document, change nothing."""
    asked, quiet = (EvictingTokenMemory([6], LRASum(Constant(0.0), Raw())) for _ in range(2))
    for document in (0, 1):
        whole = contexts(3 + document, [(document, 0, 24)])
        for start in range(0, 24, 4):
            query, own = whole.take(slice(start, start + 4)), min(start, overlap)
            for elsewhere in (query, contexts(1, [(7, 0, 5)]), query):
                asked.mass(elsewhere, DIVISOR, overlap=own)
                asked.entries(elsewhere, overlap=own)
            for memory in (asked, quiet):
                memory.write(query, overlap=own)
            for one, other in zip(asked.content.states or [], quiet.content.states or [], strict=True):
                assert torch.equal(one.ranking.score, other.ranking.score)
                assert torch.equal(one.ranking.position, other.ranking.position)


def test_one_entry_in_two_windows_counts_once_unless_the_window_is_included() -> None:
    """The window holds its context itself: the memory passes over the entries that are both."""
    whole = contexts(6, [(0, 0, 8)])
    query = whole.take(slice(6, 8))
    for include_window, held in ((False, 3), (True, 6)):
        memory = FifoTokenMemory([100], include_window=include_window)
        memory.write(whole.take(slice(0, 6)))
        alone = FifoTokenMemory([100])
        alone.write(whole.take(slice(0, held)))
        assert torch.equal(memory.mass(query, DIVISOR, overlap=3).total, alone.mass(query, DIVISOR).total)
