"""Simulated searching by several machines: what can be worked out by hand, and that a part's work is what its cells hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trime.inspection.searching import MEASURED, SearchCost, Trouble, cost_by_cells, searching, simulate
from trime.memory.retrieval.datastore import Datastore
from trime.memory.retrieval.ivf import Cells
from trime.memory.retrieval.sharded import build_parts, split_cells, split_into_parts

NONE = Trouble("none")


@pytest.mark.parametrize("machines", [1, 3])
def test_machines_are_always_busy_where_all_are_alike(machines: int) -> None:
    """The sender's own work is done while others search; a request waits for those before it."""
    waiting = simulate(np.full((30 * machines, machines), 1.0), 0.5, NONE)
    assert waiting.seconds == pytest.approx(30 * machines + 0.5)
    assert len(waiting.requests) == 30 * machines and waiting.requests.max() <= 2 * machines
    assert waiting.requests.min() == 1


def test_a_sender_with_more_work_than_the_search_is_what_is_waited_for() -> None:
    waiting = simulate(np.full((20, 2), 0.1), 5.0, NONE)
    assert waiting.seconds == pytest.approx(10 * 5, rel=0.02)


def test_all_wait_for_the_slowest() -> None:
    work = np.full((40, 4), 1.0)
    assert simulate(work, 0, Trouble("slow", slowness=3)).seconds == pytest.approx(120)
    uneven = work.copy()
    uneven[:, 2] = 1.5
    assert simulate(uneven, 0, NONE).seconds == pytest.approx(60)


def test_a_lost_machine_costs_its_absence_and_what_it_was_doing() -> None:
    work, outage = np.full((40, 4), 1.0), Trouble("lost", lost_at=10.25, lost_for=7)
    assert simulate(work, 0, outage).seconds == pytest.approx(40 + 7 + 0.25)


def test_work_on_a_part_is_what_its_visited_cells_hold(tmp_path: Path) -> None:
    keys = torch.randn(6000, 8, generator=torch.Generator().manual_seed(0))
    store = Datastore.from_tensors(tmp_path / "store", keys, torch.zeros(6000, dtype=torch.long))
    (whole,) = split_into_parts(tmp_path / "store", 1, tmp_path / "index", "Cells32", "l2")
    (tmp_path / "index").mkdir()
    build_parts([whole], tmp_path / "index", type("Bar", (), {"update": lambda self, amount: None})())
    parts = split_cells(tmp_path / "index", 3, "l2")
    cost = cost_by_cells(store.keys, parts, nprobe=4, k=16)
    cells = Cells(tmp_path / "index", "l2", 4)
    sizes = torch.from_numpy(np.diff(cells.start))
    first = store.keys.take(torch.arange(cost.queries)[:, None]).squeeze(1)
    assert cost.compared.shape == (MEASURED, len(parts)) and cost.comparison >= 0 and cost.fixed >= 0
    assert cost.compared[0].sum() == sizes[cells.visited(first)[1]].sum()
    assert np.allclose(cost.work(2.0) - cost.work(1.0), cost.comparison * cost.compared)


def test_troubles_cost_time_and_none_is_better_than_possible() -> None:
    cost = SearchCost(100, 0.1, 1e-6, np.random.default_rng(0).uniform(1e5, 2e5, (5, 4)))
    even, slow, lost = searching(cost, growth=2.0, own=0.01, part_bytes=1e9)
    assert 0.5 < even["of_ideal"] <= 1 and even["seconds_more"] == 0
    assert slow["queries_per_second"] < 0.7 * even["queries_per_second"]
    assert 10 < lost["seconds_more"] < 15 and lost["queries_per_second"] < even["queries_per_second"]
