"""What must be the same on a CUDA device as on the processor (make test-gpu)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from benchmarks.objective import Implementations
from tests.helpers.laws import ROWS, contexts
from trime.memory.objective.blockwise import blockwise_mass
from trime.memory.retrieval.search import ExactSearch
from trime.memory.visibility import External
from trime.run.runner import run
from trime.types import Contexts, TokenPosition

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


@pytest.mark.parametrize("experiment", ["trime_ext", "knn_lm_cache", "memorizing", "transformer_xl", "srupp"])
def test_a_whole_run(experiment: str, tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    assert run(tiny(f"experiment={experiment}", f"paths.outputs={tmp_path}")) is not None
