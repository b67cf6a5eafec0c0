"""Ray's workers make every part once, though workers and nodes die; what a cluster lacks is said.

Tests that start Ray are slow ones: killing its workers under load has been seen to take the test process with them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT, Tiny
from tests.helpers.parts import open_part_files
from trime.errors import UserError
from trime.lab.engines import Job, Ray, make_shard
from trime.lab.runner import run
from trime.stages.graph import Graph

ray = pytest.importorskip("ray", reason="pip install -e '.[cluster]'")
PARTS = [2, 3, 5, 8]


@pytest.fixture(autouse=True, scope="module")
def one_ray() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # workers import the jobs of these tests
    ray.shutdown()
    yield
    ray.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def made(engine: Ray, folder: Path, settings: str = "") -> list[int]:
    """Run a job and return how much work it reported, in order of size."""
    amounts: list[int] = []
    engine.run(Job(open_part_files, settings, "encode", "x", folder), lambda number, advance: None, PARTS, amounts.append)
    return sorted(amounts)


@pytest.mark.slow
def test_each_part_is_made_once_and_a_dead_worker_costs_its_parts_only(tmp_path: Path) -> None:
    """With the threads that were asked for."""
    assert made(Ray(), tmp_path, "death") == [number + 1 for number in PARTS]
    lines = [(tmp_path / str(number)).read_text().split() for number in PARTS]
    assert (tmp_path / "death").exists() and {threads for _, threads in lines} == {"1"}
    assert str(os.getpid()) not in {process for process, _ in lines}


@pytest.mark.slow
def test_workers_that_always_die_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a shard of x could not be made.*engine\.cores"):
        made(Ray(), tmp_path, "always")


def test_another_version_or_disk_on_a_node_is_an_error(tmp_path: Path) -> None:
    job = Job(open_part_files, "", "encode", "x", tmp_path / "folder")
    with pytest.raises(UserError, match=r"has trime \S+, the command 0\.0\.1"):
        make_shard(job, tmp_path, "0.0.1", 2)
    with pytest.raises(UserError, match=r"does not see .*folder"):
        make_shard(job, tmp_path, version("trime"), 2)


@contextmanager
def two_nodes(glob: str, folder: Path, enough: int) -> Iterator[str]:
    """Yield the address of a cluster of two nodes of one core, one of which is killed once so many files match."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def kill() -> None:
        while len([*folder.glob(glob)]) < enough:
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield cluster.address
        killer.join(1)
        assert not killer.is_alive(), "the node was killed meanwhile"
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_node_that_is_lost_costs_its_parts_only(tmp_path: Path) -> None:
    with two_nodes("opened-*", tmp_path, 2) as address:
        assert made(Ray(address), tmp_path, "a second each") == [number + 1 for number in PARTS]
    assert all((tmp_path / str(number)).exists() for number in PARTS)


@pytest.mark.slow
def test_a_run_with_a_lost_node_gives_the_figures_of_one_process(tiny: Tiny, tmp_path: Path) -> None:
    """The node is lost while rows are evaluated."""
    losses = []
    common = "experiment=trime_ext", "threads=1", "stages=[prepare,pack,fit,encode,index,tune,evaluate]"
    alone = tiny(*common, f"paths.outputs={tmp_path}/alone")
    run(alone)
    losses.append([row["loss"] for row in Graph(alone).evaluate.rows()])
    with two_nodes("ray/artefacts/evaluate-*.partial/part-*.safetensors", tmp_path, 1) as address:
        by_ray = tiny(*common, f"paths.outputs={tmp_path}/ray", "engine=ray", f"engine.address='{address}'")
        run(by_ray)
        losses.append([row["loss"] for row in Graph(by_ray).evaluate.rows()])
    assert losses[0] == losses[1] and len(losses[0]) > 3
