"""The peak memory of the objective grows linearly: no [n, n] beyond a block, no [b, l, v]."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT
from trime.common.metrics import process_peak, reset_process_peak
from trime.common.types import Contexts, LogMass, TokenPosition
from trime.layers import heads
from trime.layers.embeddings import AdaptiveInput, PlainInput
from trime.scoring.mixtures.joint import joint_log_prob
from trime.token_memory.train.objective.blockwise import BLOCK, blockwise_mass
from trime.token_memory.train.visibility import External, Local, Long


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    cells = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else [result]
        self.cells = max([self.cells, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return result


def step(n: int, head: Any, visibility: Any, width: int) -> None:
    """Run forward and backward of the objective on n contexts of 4 segments."""
    order = torch.arange(n)
    f, g = (torch.randn(n, width, requires_grad=True) for _ in range(2))
    token = torch.randint(3000, (n,))
    contexts = Contexts(g, token, TokenPosition(order * 0, order // (n // 4), order))
    mass = blockwise_mass(contexts, contexts, visibility, torch.tensor([math.sqrt(width)]))
    loss = -joint_log_prob(head.mass(f, token), [LogMass(mass.target[0], mass.total[0])]).sum()
    loss.backward()


HEADS = {
    "plain": lambda: heads.Softmax(PlainInput(3000, 16)),
    "adaptive": lambda: heads.AdaptiveSoftmax(AdaptiveInput(3000, 16, [1000, 2000])),
}


@pytest.mark.parametrize("visibility", [Local(), Long(), External()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("kind", list(HEADS))
def test_no_tensor_grows_faster_than_n(kind: str, visibility: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS_PER_BLOCK", 2**18)
    largest = {}
    for n in (2048, 4096):
        with LargestTensor() as recorder:
            step(n, HEADS[kind](), visibility, width=16)
        largest[n] = recorder.cells
    assert largest[4096] <= 2 * largest[2048]
    assert largest[4096] <= 2 * BLOCK**2 < 4096 * 3000, "a block, not [n, v] and not [n, n]"


LARGE = 16384


@pytest.mark.slow
def test_peak_memory_is_far_below_one_matrix() -> None:
    """In a separate process, for memory that other tests freed would be used; large enough that blocks are small."""
    command = [sys.executable, "-c", "from tests.token_memory.test.test_growth import extra; print(extra())"]
    more = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1])
    direct = LARGE * LARGE * 4
    assert more < direct / 4, f"{more / 2**20:.0f} MiB more; one [n, n] matrix has {direct / 2**20:.0f}"


def extra() -> int:
    """Return the bytes that a large step takes beyond a small one."""
    heads.LOGITS_PER_BLOCK = 2**18
    step(1024, HEADS["adaptive"](), Long(), width=16)  # libraries allocate their working memory
    reset_process_peak()
    before = process_peak()
    step(LARGE, HEADS["adaptive"](), Long(), width=16)
    return process_peak() - before
