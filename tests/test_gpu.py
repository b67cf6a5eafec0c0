"""What must be the same on a CUDA device as on the processor (make test-gpu)."""

from __future__ import annotations

import math
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import distributed

from benchmarks.objective import Implementations
from tests.conftest import Tiny
from tests.helpers.laws import ROWS, contexts
from trime.common.types import Contexts, TokenPosition
from trime.lab.runner import run
from trime.token_memory.search.search import ExactSearch
from trime.token_memory.train.distributed import _Gather
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import External

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_device(memory: Contexts) -> Contexts:
    return Contexts(memory.g.cuda(), memory.token.cuda(), TokenPosition(*(column.cuda() for column in memory.positions)))


def test_blockwise_mass() -> None:
    memory, divisor = contexts(1, ROWS), torch.tensor([math.sqrt(6)], dtype=torch.float64)
    host, device = (blockwise_mass(part, part, External(), divisor, 4) for part in (memory, on_device(memory)))
    assert torch.allclose(host.total, device.total.cpu()) and torch.allclose(host.target, device.target.cpu())


@pytest.mark.parametrize("sight", ["external", "local", "long"])
def test_the_objective_is_the_direct_formulation(sight: str) -> None:
    """By the kernels, in float32, several tiles and one that is not full."""
    ways = Implementations(9000, 64, "cuda")
    torch.testing.assert_close(ways.blockwise(sight), ways.direct(sight), rtol=1e-3, atol=1e-5)


def test_exact_search() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(500, 8), torch.randn(9, 8)
    found = [ExactSearch(lambda: iter(keys.split(100)), "l2").nearest(part, 7)[1].cpu() for part in (query, query.cuda())]
    assert torch.equal(*found)


def test_a_compiled_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives what is computed without it; it cannot trace the shape checks of tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    memory, divisor = on_device(contexts(1, ROWS)), torch.tensor([math.sqrt(6)], dtype=torch.float64, device="cuda")
    plain, compiled = (
        way(memory, memory, External(), divisor, 4).total for way in (blockwise_mass, torch.compile(blockwise_mass))
    )
    torch.testing.assert_close(compiled, plain)


def test_gathering_by_nccl(tmp_path: Path) -> None:
    """Of a single process: it gets its own rows, with their gradient."""
    distributed.init_process_group("nccl", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        g = torch.randn(5, 3, device="cuda", requires_grad=True)
        gathered = _Gather.apply(g, [5])
        (gathered * torch.arange(15.0, device="cuda").view(5, 3)).sum().backward()
        assert torch.equal(gathered, g) and torch.equal(g.grad, torch.arange(15.0, device="cuda").view(5, 3))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("experiment", ["trime_ext", "knn_lm_cache", "memorizing", "transformer_xl", "srupp"])
def test_a_whole_run(experiment: str, tiny: Tiny, tmp_path: Path) -> None:
    assert run(tiny(f"experiment={experiment}", f"paths.outputs={tmp_path}")) is not None
