"""Laws of bounded memories, for every policy in conf/eviction."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.golden.memories import evicted
from trime import FIFO, LFU, LRU
from trime.common.types import AttentionBlock, Ranking
from trime.errors import UserError
from trime.kv.bounded import BoundedMemory, MemoryState, keep_best
from trime.kv.eviction.base import EvictionPolicy, retrieved_entries

POLICIES = sorted(path.stem for path in (ROOT / "conf" / "eviction").glob("*.yaml"))
ROWS = 3
FOR_SMALL_MEMORIES = {"snapkv": {"window": 3}, "sink": {"sinks": 2}}  # by default these keep more than the memories here hold


def policy_of(name: str, **settings: int) -> EvictionPolicy:
    """Return the policy that conf/eviction/NAME.yaml describes, with other settings."""
    return instantiate(OmegaConf.load(ROOT / "conf" / "eviction" / f"{name}.yaml"), _convert_="all", **settings)


def small_policy_of(name: str, **settings: int) -> EvictionPolicy:
    """Return the same policy, but so that memories of a few entries leave it a choice."""
    return policy_of(name, **(FOR_SMALL_MEMORIES.get(name, {}) | settings))


def least_size(policy: EvictionPolicy) -> int:
    """Return the size of the smallest memory that leaves the policy a choice."""
    for size in range(1, 100):
        with contextlib.suppress(UserError):
            return BoundedMemory(size, policy).size
    raise AssertionError("no size is large enough")


def chunk(start: int, count: int, valid: float = 0.8) -> torch.Tensor:
    """Return positions of new entries, some of them -1: no entry."""
    position = torch.arange(start, start + count).expand(ROWS, -1)
    return position.masked_fill(torch.rand(position.shape) > valid, -1)


def attend(policy: EvictionPolicy, state: MemoryState, position: torch.Tensor) -> MemoryState:
    """Return the state after random attention of queries at the given positions."""
    score = torch.randn(ROWS, 2, position.shape[1], state.ranking.position.shape[1], dtype=torch.float64)
    block = AttentionBlock(score.masked_fill((state.ranking.position < 0)[:, None, None], -torch.inf), position)
    return state._replace(ranking=policy.finalize(state.ranking, policy.observe(policy.begin(state.ranking), block)))


def read(memory: BoundedMemory, sizes: list[int]) -> tuple[MemoryState, set, set]:
    """Return the state after chunks of those sizes, all entries that were written, and all that were evicted."""
    state, came, went, start = memory.empty((torch.zeros(ROWS, 0, 2),)), set(), set(), 0
    for size in sizes:
        position = chunk(start, size)
        columns = (torch.stack([position, -position], 2).float(),)
        updated = memory.update(state, columns, position)
        in_place = memory.overwrite(state._replace(columns=tuple(part.clone() for part in state.columns)), columns, position)
        assert all(map(torch.equal, (*updated.columns, *updated.ranking), (*in_place.columns, *in_place.ranking)))
        came |= entries(position.tolist())
        gone = entries(evicted(state.ranking.position, position, updated.ranking.position))
        assert not gone & went
        went |= gone
        state, start = attend(memory.policy, updated, position), start + size
    return state, came, went


def entries(position: list[list[int]]) -> set[tuple[int, int]]:
    """Return the pairs of row and position of all entries."""
    return {(row, place) for row, places in enumerate(position) for place in places if place >= 0}


@pytest.mark.parametrize("size", [0, None, 7, 40])
@pytest.mark.parametrize("name", POLICIES)
def test_entries_either_stay_or_are_evicted(name: str, size: int | None) -> None:
    """In memories without room, of the smallest size that the policy takes, and larger ones."""
    policy = small_policy_of(name)
    capacity = least_size(policy) if size is None else size
    torch.manual_seed(capacity)
    memory = BoundedMemory(capacity, policy)
    state, came, went = read(memory, [5, 5, 0, 12, 3, 9, 5])  # 12 at once do not fit a memory of 7
    stays = entries(state.ranking.position.tolist())
    assert stays | went == came and not stays & went
    for row in range(ROWS):
        count = sum(entry[0] == row for entry in came)
        assert sum(entry[0] == row for entry in stays) == min(count, capacity)
    filled = state.ranking.position >= 0
    assert torch.equal(state.columns[0][..., 1][filled].long(), -state.ranking.position[filled])
    assert state.ranking.score.dtype == torch.float64 and (state.ranking.score.isfinite() | ~filled | (name == "sink")).all()
    assert (state.ranking.score[~filled] == -torch.inf).all()


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_entries_of_a_row_stay_as_sinks(name: str) -> None:
    """Also after the row has been reset; the memory stays full, and other entries come and go."""
    torch.manual_seed(2)
    memory = BoundedMemory(9, small_policy_of(name, sinks=3))
    state, came, went = read(memory, [2, 5, 12, 3, 9])
    first = [sorted(place for row, place in came if row == number)[:3] for number in range(ROWS)]
    stays = entries(state.ranking.position.tolist())
    assert went and all((row, place) in stays for row, places in enumerate(first) for place in places)
    assert len(stays) == 9 * ROWS
    state = memory.reset(state, torch.tensor([True, False, False]))
    for start in (40, 46, 52, 58):
        position = chunk(start, 6, valid=1.0)
        state = attend(memory.policy, memory.update(state, (torch.zeros(ROWS, 6, 2),), position), position)
    kept = state.ranking.position.sort(1).values[:, :3].tolist()
    assert kept == [[40, 41, 42], first[1], first[2]]


@pytest.mark.parametrize("name", POLICIES)
def test_rows_are_reset_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    memory = BoundedMemory(6, small_policy_of(name))
    state, _, _ = read(memory, [4, 8])
    cleared = memory.reset(state, torch.tensor([False, True, False]))
    fresh = memory.empty(state.columns)
    states = ((*one.columns, *one.ranking) for one in (state, cleared, fresh))
    for old, new, none in zip(*states, strict=True):
        assert torch.equal(new[[0, 2]], old[[0, 2]]) and torch.equal(new[1], none[1])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_blocks_of_queries_make_no_difference(name: str, size: int) -> None:
    torch.manual_seed(1)
    policy = small_policy_of(name)
    state, _, _ = read(BoundedMemory(9, policy), [6, 6])
    score, position = torch.randn(ROWS, 2, 8, 9, dtype=torch.float64), chunk(12, 8)
    whole = policy.observe(policy.begin(state.ranking), AttentionBlock(score, position))
    part = policy.begin(state.ranking)
    for rows in torch.arange(8).split(size):
        part = policy.observe(part, AttentionBlock(score[:, :, rows], position[:, rows]))
    for a, b in zip(policy.finalize(state.ranking, whole), policy.finalize(state.ranking, part), strict=True):
        assert torch.allclose(a.double().nan_to_num(neginf=-1e9), b.double().nan_to_num(neginf=-1e9), atol=1e-12)


@pytest.mark.parametrize("retrieved, count", [(None, 32), (5, 5), (40, 40)])
def test_a_fixed_number_counts_as_used_only_where_nothing_is_retrieved(retrieved: int | None, count: int) -> None:
    torch.manual_seed(4)
    score = torch.randn(1, 1, 1, 50, dtype=torch.float64)
    hits = None if retrieved is None else torch.zeros_like(score, dtype=torch.bool)
    if hits is not None:
        hits[..., :retrieved] = True
    for name in ("lru", "lfu"):
        policy = small_policy_of(name)
        assert isinstance(policy, LRU | LFU)
        mask = retrieved_entries(AttentionBlock(score, torch.tensor([[60]]), hits), policy.top_k, policy.fallback_top_k)
        assert int(mask.sum()) == count and (hits is None or torch.equal(mask, hits))


def test_an_entry_that_enters_carries_its_gradient() -> None:
    """Entries can be attended with gradient; detached columns receive none."""
    column = torch.randn(ROWS, 4, 2, requires_grad=True)
    memory = BoundedMemory(3, FIFO())
    state = memory.update(memory.empty((column,)), (column,), torch.arange(4).expand(ROWS, -1))
    state.columns[0].sum().backward()
    assert column.grad is not None and torch.equal(column.grad[0, :, 0], torch.tensor([0.0, 1.0, 1.0, 1.0]))


def settings_of(policy: object) -> object:
    """Return the class and the settings of a policy, and those of its parts."""
    is_part = type(policy).__module__.startswith("trime.")
    return (type(policy), {name: settings_of(value) for name, value in vars(policy).items()}) if is_part else policy


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"lfa_gamma"}))
def test_a_policy_without_arguments_is_that_of_its_yaml(name: str) -> None:
    configured = policy_of(name)
    assert settings_of(type(configured)()) == settings_of(configured)


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize(("size", "new"), [(1, 1), (7, 3), (7, 20), (64, 16), (64, 1), (3, 0)])
@pytest.mark.parametrize("values", [2, 1000])
def test_the_best_entries_stay_in_their_slots(values: int, size: int, new: int, newest_first: bool) -> None:
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
