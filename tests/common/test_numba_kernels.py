"""Kernels give the same bytes right after they were compiled and from the cache, so that a first run equals later ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from trime.common.numba_kernels import LANES, STEP, lane_sum

CODE = """
import hashlib, torch
from trime.memory.training.objective.blockwise import blockwise_mass
from trime.memory.training.objective.blockwise_cpu import entry_masses
from trime.memory.training.visibility import External, Long
from trime.common.types import Contexts, TokenPosition

torch.manual_seed(0)
rows, length = 9, 150
segment = torch.arange(rows).repeat_interleave(length)
place = TokenPosition(segment // 3, segment, torch.arange(length).repeat(rows) + segment % 3 * length)
g = torch.randn(rows * length, 24, requires_grad=True)
contexts = Contexts(g, torch.randint(40, (rows * length,)), place)
digest = hashlib.sha256()
for visibility in (Long(), External()):
    mass = blockwise_mass(contexts, contexts, visibility, torch.tensor([5.0]))
    gradient, = torch.autograd.grad((mass.total - mass.target).masked_fill(mass.target.isinf(), 0).sum(), g)
    for part in (mass.target, mass.total, gradient):
        digest.update(part.detach().numpy().tobytes())
scores, tokens = torch.randn(70, 333) * 4, torch.randint(9, (70, 333))
mass = entry_masses(scores, tokens, torch.randint(9, (70,)), torch.tensor([0.5, 1.0, 2.0, 3.0]))
digest.update(mass.target.numpy().tobytes() + mass.total.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_compiled_and_cached_kernels_agree_to_the_last_bit(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE]
    runs = [subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert len(runs[0].stdout) > 60 and runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("count", [0, 1, 7, LANES, LANES + 1, STEP - 1, STEP, 3 * STEP + LANES + 5])
def test_a_lane_sum_is_the_sum(count: int) -> None:
    x = np.random.default_rng(count).random(count).astype(np.float32)
    assert lane_sum(x, np.full(LANES, np.nan, np.float32)) == pytest.approx(x.astype(np.float64).sum(), rel=1e-6)
