"""Helpers for golden tests of memories inside attention: arrays, case parameters, and what a memory evicts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.golden.published import FOLDER, present

ROOT = FOLDER / "memory"


@cache
def description(name: str) -> dict[str, Any]:
    """Return the parameters of a group of cases."""
    return json.loads(present(ROOT / f"{name}.json").read_text())


@cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return a file's arrays, small integers widened; no test changes them."""
    with np.load(present(ROOT / f"{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: value.long() if value.dtype in (torch.int16, torch.int32) else value for key, value in arrays.items()}


def evicted(before: torch.Tensor, position: torch.Tensor, after: torch.Tensor) -> list[list[int]]:
    """Return for each row the positions that were in memory or came, and are no longer there, oldest first."""
    rows = zip(before.tolist(), position.tolist(), after.tolist(), strict=True)
    return [sorted({*old, *new} - {*kept, -1}) for old, new, kept in rows]
