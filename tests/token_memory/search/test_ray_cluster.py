"""The external memory on Ray workers finds what one index finds; a worker that dies restarts, or the search fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from tests.conftest import Tiny
from tests.helpers.stores import QUERY, blocks, divided, stored
from trime.errors import UserError
from trime.lab.runner import run
from trime.stages.graph import Graph
from trime.token_memory.search.ivf import IVFSearch
from trime.token_memory.search.ray_cluster import RaySearch
from trime.token_memory.search.search import ExactSearch

ray = pytest.importorskip("ray", reason="pip install -e '.[cluster]'")


@pytest.fixture(scope="module", autouse=True)
def shut_down_ray() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("factory", [pytest.param(None, marks=pytest.mark.slow), "Cells16"])
def test_workers_answer_as_one_index(factory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a worker is killed; a worker that restarts and does not find its part raises an error."""
    monkeypatch.setattr("trime.token_memory.search.ray_cluster.QUERIES", 8)  # several batches are pending at once
    parts = divided(stored(tmp_path), 2, factory, "ip")
    workers = RaySearch(parts, nprobe=3, device="cpu", address=None, cores=1)
    score, number = workers.nearest(QUERY, 30)
    theirs = (IVFSearch(parts[0].folder, "ip", 3) if factory else ExactSearch(blocks, "ip")).nearest(QUERY, 30)
    assert torch.allclose(score, theirs[0], atol=1e-5) and torch.equal(number.sort()[0], theirs[1].sort()[0])
    waits = [workers.begin(QUERY[rows], 30) for rows in (slice(9, None), slice(9))]  # both are pending at once
    last, first = (wait()[1] for wait in waits)
    assert torch.equal(torch.cat([first, last]), number)
    assert workers.kind == ("approximate" if factory else "exact")
    os.kill(ray.get(workers.workers[1].process.remote()), signal.SIGKILL)
    again = workers.nearest(QUERY, 30)
    assert torch.equal(again[0], score) and torch.equal(again[1], number)
    if factory:
        parts[1].folder.rename(tmp_path / "away")
        os.kill(ray.get(workers.workers[1].process.remote()), signal.SIGKILL)
        with pytest.raises(UserError, match="all machines must see"):
            workers.nearest(QUERY, 30)
        (tmp_path / "away").rename(parts[1].folder)
        ray.kill(workers.workers[0])
        with pytest.raises(UserError, match="died"):
            workers.nearest(QUERY, 30)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [None, "Cells16"])
def test_replicated_parts_answer_as_one_index(factory: str | None, tmp_path: Path) -> None:
    parts = divided(stored(tmp_path), 3, factory, "ip")
    found = [RaySearch(parts, nprobe=3, device="cpu", address=None, cores=1, replicas=count) for count in (1, 2)]
    assert len(found[1].workers) == 2 * len(parts)
    assert torch.equal(found[0].nearest(QUERY, 30)[1], found[1].nearest(QUERY, 30)[1])
    for workers in found:
        workers.close()


@pytest.mark.slow
def test_a_run_by_ray_is_a_local_one(tiny: Tiny) -> None:
    """Three parts on workers give the results of one local index."""
    common = ("experiment=trime_ext", "mixture=none", "index=cells", "index.factory=Cells16", "index.nprobe=4")
    config = tiny(*common, "index.parts=3", "index.engine=ray")
    distributed, index = losses_of(config), Graph(config).memories.datastores[0].index
    assert index is not None and isinstance(index.search(), RaySearch)
    local = losses_of(tiny(*common))
    assert distributed == pytest.approx(local, rel=1e-5) and len(local) > 1  # ties for the last place may differ


def losses_of(config: DictConfig) -> list[float]:
    """Run an experiment and return the test loss of each row."""
    run(config)
    results = json.loads((Graph(config).run_folder / "results.json").read_text())
    return [row["loss"] for row in results["metrics"]["test"]]


@pytest.mark.slow
def test_a_wrong_address_is_an_error() -> None:
    ray.shutdown()
    with pytest.raises(UserError, match="no Ray cluster answers"):
        RaySearch([], 1, "cpu", "127.0.0.1:1", 1)
