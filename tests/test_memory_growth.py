"""Peak memory of the objective grows linearly: no [n, n] beyond a block, no [b, l, v]."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trime.memory.blockwise import blockwise_mass
from trime.memory.visibility import External, Local, Long
from trime.metrics import process_peak, reset_process_peak
from trime.mixtures.joint import joint
from trime.models import heads
from trime.models.embeddings import AdaptiveInput, PlainInput
from trime.types import Contexts, Mass, Place


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    cells = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else [result]
        self.cells = max([self.cells, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return result


def step(n: int, head: Any, visibility: Any, width: int) -> None:
    """Forward and backward of the objective on n contexts of 4 segments."""
    order = torch.arange(n)
    f, g = (torch.randn(n, width, requires_grad=True) for _ in range(2))
    token = torch.randint(head_size(head), (n,))
    contexts = Contexts(g, token, Place(order * 0, order // (n // 4), order))
    found = blockwise_mass(contexts, contexts, visibility, torch.tensor([math.sqrt(width)]))
    loss = -joint(head.evidence(f, token), [Mass(found.target[0], found.total[0])]).sum()
    loss.backward()


def head_size(head: Any) -> int:
    return head.vocabulary if isinstance(head, heads.Softmax) else head.bands[-1][1]


HEADS = {
    "plain": lambda: heads.Softmax(PlainInput(2000, 16)),
    "adaptive": lambda: heads.AdaptiveSoftmax(AdaptiveInput(3000, 16, [1000, 2000])),
}


@pytest.mark.parametrize("visibility", [Local(), Long(), External()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("kind", list(HEADS))
def test_no_tensor_grows_faster_than_n(kind: str, visibility: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CELLS", 2**18)
    largest = {}
    for n in (2048, 4096):
        with Largest() as watch:
            step(n, HEADS[kind](), visibility, width=16)
        largest[n] = watch.cells
    assert largest[4096] <= 2 * largest[2048]
    assert largest[4096] <= 2 * 2**18 < 4096 * 2000, "a block, not [n, v] and not [n, n]"


def test_peak_memory_is_far_below_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CELLS", 2**18)
    step(1024, HEADS["adaptive"](), Long(), width=16)  # libraries take their working memory
    before = reset_and_read()
    step(8192, HEADS["adaptive"](), Long(), width=16)
    extra, direct = process_peak() - before, 8192 * 8192 * 4
    assert extra < direct / 8, f"{extra / 2**20:.0f} MiB more; one [n, n] matrix has {direct / 2**20:.0f}"


def reset_and_read() -> int:
    reset_process_peak()
    return process_peak()
