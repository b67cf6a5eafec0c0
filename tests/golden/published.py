"""Reads the golden folder: cases, checkpoints in the released format, windows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trime.models.embeddings import AdaptiveInput
from trime.models.heads import AdaptiveSoftmax
from trime.models.network import Network
from trime.models.released import network_of, read_checkpoint
from trime.types import Batch

PAD = 1
ROOT = Path(os.environ.get("TRIME_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "trime"


def index(part: str) -> dict[str, Any]:
    """The cases of a part; empty where the folder is absent, so that its tests skip."""
    path = ROOT / part
    return json.loads(path.read_text()) if path.is_file() else {}


def parametrized(name: str, cases: list[Any]) -> Any:
    """One test a case, or one skipped test that says what is missing."""
    absent = pytest.mark.skip(reason=f"no golden vectors at {ROOT}")
    return pytest.mark.parametrize(name, cases or [pytest.param(*["absent"] * len(name.split(",")), marks=absent)])


def arrays(path: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / path) as file:
        return dict(file)


def copy(module: Any, weight: Any) -> None:
    """Loads one tensor, whatever the precision."""
    with torch.no_grad():
        module.copy_(torch.as_tensor(weight))


def adaptive_head(case: dict[str, Any], weights: dict[str, np.ndarray], published: bool = False) -> AdaptiveSoftmax:
    """The output layer of a loss case, in float64."""
    embedding = AdaptiveInput(case["V"], weights["head_emb"].shape[1], case["cutoff"][:-1], case["factor"])
    head = AdaptiveSoftmax(embedding, tied_projections=False, dropped_in_band=published).double()
    copy(head.tables[0], weights["head_emb"])
    if "head_class" in weights:
        copy(head.classes, weights["head_class"])
    for tail, projection in enumerate(head.projections):
        copy(head.tables[tail + 1], weights[f"tail{tail}_emb"])
        copy(projection, weights[f"tail{tail}_proj"])
    return head


def network(model: str, which: str = "checkpoint_last", published: bool = False) -> Network:
    """The network of a released-format checkpoint, through the importer."""
    found, _ = network_of(read_checkpoint(ROOT / "model" / model / f"{which}.pt"))
    if published and isinstance(found.head, AdaptiveSoftmax):
        found.head.dropped_in_band = True
    return found


def windows_of(name: str) -> list[Batch]:
    """A set of windows as fed to the published model, each a batch of one row, with their places in the stream."""
    found = index("eval/windows.json")[name]
    counts = {window["id"]: sum(token != PAD for token in window["target"]) for window in found}
    ids = sorted(counts)
    firsts = dict(zip(ids, [0, *np.cumsum([counts[i] for i in ids])[:-1].tolist()], strict=True))
    return [window_batch(window, firsts[window["id"]]) for window in found]


def window_batch(window: dict[str, Any], first: int) -> Batch:
    """One window; ``first`` is where its scored tokens begin in the stream. Context targets are the next source tokens."""
    source, target = torch.tensor(window["src"]), torch.tensor(window["target"])
    length = int((source != PAD).sum())
    shifted = torch.cat([source[1:length], target[length - 1 : length]])
    one, scored = torch.ones(1, dtype=torch.long), target[None, :length] != PAD
    begin = one * (first - int((~scored).sum()))
    return Batch(
        source[None, :length], shifted[None], one * length, scored, one * 0, one * int(window["id"]), begin, begin == 0
    )
