"""Laws of bounded memories, for every policy that conf/eviction names."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.conftest import ROOT
from trime.eviction.base import EvictionPolicy, used
from trime.eviction.fifo import FIFO
from trime.eviction.lfu import LFU
from trime.eviction.lru import LRU
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.types import AttentionBlock

POLICIES = sorted(path.stem for path in (ROOT / "conf" / "eviction").glob("*.yaml"))
ROWS = 3


def policy_of(name: str) -> EvictionPolicy:
    return instantiate(OmegaConf.load(ROOT / "conf" / "eviction" / f"{name}.yaml"), _convert_="all")


def chunk(start: int, count: int, valid: float = 0.8) -> torch.Tensor:
    """Positions of new entries, some of which are none."""
    position = torch.arange(start, start + count).expand(ROWS, -1)
    return position.masked_fill(torch.rand(position.shape) > valid, -1)


def attend(policy: EvictionPolicy, held: MemoryState, position: torch.Tensor) -> MemoryState:
    score = torch.randn(ROWS, 2, position.shape[1], held.ranking.position.shape[1], dtype=torch.float64)
    block = AttentionBlock(score.masked_fill((held.ranking.position < 0)[:, None, None], -torch.inf), position)
    return held._replace(ranking=policy.finalize(held.ranking, policy.observe(policy.begin(held.ranking), block)))


def read(memory: BoundedMemory, sizes: list[int]) -> tuple[MemoryState, set, set]:
    """The memory after chunks of those sizes, all entries that came, and all that went."""
    held, came, went, start = memory.empty((torch.zeros(ROWS, 0, 2),)), set(), set(), 0
    for size in sizes:
        position = chunk(start, size)
        columns = (torch.stack([position, -position], 2).float(),)
        updated = memory.update(held, columns, position)
        within = memory.overwrite(held._replace(columns=tuple(own.clone() for own in held.columns)), columns, position)
        held, evicted = memory.insert(held, columns, position)
        for same in (updated, within):  # they differ only in what becomes of the evicted
            assert all(map(torch.equal, (*held.columns, *held.ranking), (*same.columns, *same.ranking)))
        came |= entries(position)
        fresh = entries(evicted.position)
        assert len(fresh) == int((evicted.position >= 0).sum()) and not fresh & went
        went |= fresh
        filled = evicted.position >= 0
        assert torch.equal(evicted.columns[0][..., 0][filled].long(), evicted.position[filled])
        held, start = attend(memory.policy, held, position), start + size
    return held, came, went


def entries(position: torch.Tensor) -> set[tuple[int, int]]:
    return {(row, place) for row, places in enumerate(position.tolist()) for place in places if place >= 0}


@pytest.mark.parametrize("capacity", [0, 1, 7, 40])
@pytest.mark.parametrize("name", POLICIES)
def test_what_stays_and_what_goes_is_what_came(name: str, capacity: int) -> None:
    torch.manual_seed(capacity)
    memory = BoundedMemory(capacity, policy_of(name))
    held, came, went = read(memory, [5, 5, 0, 12, 3, 9, 5])  # 12 at once do not fit a memory of 7
    stays = entries(held.ranking.position)
    assert stays | went == came and not stays & went
    for row in range(ROWS):
        own = sum(entry[0] == row for entry in came)
        assert sum(entry[0] == row for entry in stays) == min(own, capacity)
    filled = held.ranking.position >= 0
    assert torch.equal(held.columns[0][..., 1][filled].long(), -held.ranking.position[filled])
    assert held.ranking.score.dtype == torch.float64 and (held.ranking.score.isfinite() | ~filled | (name == "sink")).all()
    assert (held.ranking.score[~filled] == -torch.inf).all()


@pytest.mark.parametrize("name", POLICIES)
def test_rows_are_reset_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    memory = BoundedMemory(6, policy_of(name))
    held, _, _ = read(memory, [4, 8])
    cleared = memory.reset(held, torch.tensor([False, True, False]))
    fresh = memory.empty(held.columns)
    states = ((*state.columns, *state.ranking) for state in (held, cleared, fresh))
    for old, new, none in zip(*states, strict=True):
        assert torch.equal(new[[0, 2]], old[[0, 2]]) and torch.equal(new[1], none[1])


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_of_queries_make_no_difference(name: str) -> None:
    torch.manual_seed(1)
    policy = policy_of(name)
    held, _, _ = read(BoundedMemory(9, policy), [6, 6])
    score, position = torch.randn(ROWS, 2, 8, 9, dtype=torch.float64), chunk(12, 8)
    whole = policy.observe(policy.begin(held.ranking), AttentionBlock(score, position))
    part = policy.begin(held.ranking)
    for start in range(0, 8, 3):
        part = policy.observe(part, AttentionBlock(score[:, :, start : start + 3], position[:, start : start + 3]))
    for a, b in zip(policy.finalize(held.ranking, whole), policy.finalize(held.ranking, part), strict=True):
        assert torch.allclose(a.double().nan_to_num(neginf=-1e9), b.double().nan_to_num(neginf=-1e9), atol=1e-12)


@pytest.mark.parametrize("retrieved, count", [(None, 32), (5, 5), (40, 40)])
def test_a_fixed_number_counts_as_used_only_where_nothing_is_retrieved(retrieved: int | None, count: int) -> None:
    torch.manual_seed(4)
    score = torch.randn(1, 1, 1, 50, dtype=torch.float64)
    hits = None if retrieved is None else torch.zeros_like(score, dtype=torch.bool)
    if hits is not None:
        hits[..., :retrieved] = True
    for name in ("lru", "lfu"):
        policy = policy_of(name)
        assert isinstance(policy, LRU | LFU)
        found = used(AttentionBlock(score, torch.tensor([[60]]), hits), policy.top_k, policy.of_all)
        assert int(found.sum()) == count and (hits is None or torch.equal(found, hits))


def test_fifo_is_a_window() -> None:
    held, came, _ = read(BoundedMemory(10, FIFO()), [6, 7, 4, 9])
    for row in range(ROWS):
        newest = sorted(place for r, place in came if r == row)[-10:]
        assert sorted(held.ranking.position[row].tolist()) == newest


def test_an_entry_that_enters_carries_its_gradient() -> None:
    """What a memory takes in can be attended with gradient; who wants none hands in constants."""
    column = torch.randn(ROWS, 4, 2, requires_grad=True)
    memory = BoundedMemory(3, FIFO())
    held, evicted = memory.insert(memory.empty((column,)), (column,), torch.arange(4).expand(ROWS, -1))
    (held.columns[0].sum() + 2 * evicted.columns[0][:, :1].sum()).backward()
    assert column.grad is not None and torch.equal(column.grad[0, :, 0], torch.tensor([2.0, 1.0, 1.0, 1.0]))
