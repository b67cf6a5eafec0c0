"""Reads the golden folder's memories inside attention: arrays and the parameters of their cases."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from tests.golden.published import ROOT as TRIME

ROOT = TRIME.parent / "memory"


def description(name: str) -> dict[str, Any]:
    """The parameters of a group; empty where the folder is absent, so that its tests skip."""
    path = ROOT / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def tensors(name: str) -> dict[str, torch.Tensor]:
    """A file's arrays, small integers widened."""
    with np.load(ROOT / f"{name}.npz") as file:
        found = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: value.long() if value.dtype in (torch.int16, torch.int32) else value for key, value in found.items()}
