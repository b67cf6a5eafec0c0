"""Results of runs that were never made."""

from __future__ import annotations

import math
from typing import Any


def made(
    name: str, seed: int, losses: list[float], policy: str | None = None, size: int | list[int] | None = None
) -> dict[str, Any]:
    """Return a run with one document of 100 tokens for each loss."""
    loss = sum(losses) / len(losses)
    row = {
        "memories": "vocabulary",
        "tuned": {},
        "loss": loss,
        "perplexity": math.exp(loss),
        "tokens": 100 * len(losses),
        "documents": [[100 * document_loss, 100] for document_loss in losses],
        "search": None,
        "memory_size": size,
        "eviction": policy,
        "tokens_per_second": 1000.0,
        "peak_memory_mb": 500.0,
    }
    return {
        "name": name,
        "seed": seed,
        "config_hash": f"{name}{seed}{policy}{size}",
        "dataset": {"name": "text", "fingerprint": "f"},
        "parameters": 1000,
        "train": {"updates": 10, "tokens_per_second": 100.0},
        "metrics": {"valid": [row], "test": [row]},
    }
