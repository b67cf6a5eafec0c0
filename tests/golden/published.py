"""Read the golden vectors: index files, arrays, and tests with one run for each case.

They are those beside this file, or a fuller set in the folder that ``TRIME_GOLDEN`` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trime.layers.embeddings import AdaptiveInput
from trime.layers.heads import AdaptiveSoftmax

PAD = 1
COMPACT = Path(__file__).parent / "vectors"
FOLDER = Path(os.environ.get("TRIME_GOLDEN") or COMPACT)
ROOT = FOLDER / "trime"
if FOLDER != COMPACT and not any((FOLDER / part).is_dir() for part in ("trime", "memory")):
    raise FileNotFoundError(f"TRIME_GOLDEN={FOLDER} holds no vectors: name a folder with trime/ and memory/")


def present(path: Path) -> Path:
    """Return a file's path; where a set that TRIME_GOLDEN names lacks the file, the tests that read it are skipped."""
    if FOLDER != COMPACT and not path.is_file():
        pytest.skip(f"no {path}", allow_module_level=True)
    return path


def index(part: str) -> dict[str, Any]:
    """Return an index file's entries."""
    return json.loads(present(ROOT / part).read_text())


def parametrized(name: str, cases: Sequence[Any]) -> Any:
    """Mark a test to run on each case; a fuller set may lack a kind of case, the vectors of this repository may not."""
    if not cases and FOLDER == COMPACT:
        raise LookupError(f"no case of {name} in {COMPACT}: scripts/compact_vectors.py must choose one")
    absent = pytest.param(*["absent"] * len(name.split(",")), marks=pytest.mark.skip(reason=f"no such case in {FOLDER}"))
    return pytest.mark.parametrize(name, cases or [absent])


def arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file."""
    with np.load(present(ROOT / path)) as file:
        return dict(file)


def names_in(path: str) -> list[str]:
    """Return the names of a file's arrays, without reading them."""
    with np.load(present(ROOT / path)) as file:
        return file.files


def copy(module: Any, weight: Any) -> None:
    """Load one tensor, whatever the precision."""
    with torch.no_grad():
        module.copy_(torch.as_tensor(weight))


def assert_near(actual: torch.Tensor, expected: Any, roundings: int = 32) -> None:
    """Assert equality up to some roundings of float32 of the largest number, 1 at least."""
    wanted = torch.as_tensor(expected).float()
    assert (actual - wanted).abs().max() <= roundings * torch.finfo(torch.float32).eps * wanted.abs().max().clamp(min=1)


def adaptive_head(case: dict[str, Any], weights: dict[str, np.ndarray], published: bool = False) -> AdaptiveSoftmax:
    """Return the output layer of a loss case, in float64."""
    embedding = AdaptiveInput(case["V"], weights["head_emb"].shape[1], case["cutoff"][:-1], case["factor"])
    head = AdaptiveSoftmax(embedding, tied_projections=False, dropped_in_band=published).double()
    copy(head.tables[0], weights["head_emb"])
    if "head_class" in weights:
        copy(head.classes, weights["head_class"])
    for tail, projection in enumerate(head.projections):
        copy(head.tables[tail + 1], weights[f"tail{tail}_emb"])
        copy(projection, weights[f"tail{tail}_proj"])
    return head
