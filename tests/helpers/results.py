"""Results of runs that were never made."""

from __future__ import annotations

import math
from typing import Any


def answered(policy: str, size: int, share: float, prompt_tokens: int = 1000, questions: int = 50) -> dict[str, Any]:
    """Return an answering run with this share of answers."""
    row = {"exact_match": share, "contained": share, "questions": questions, "prompt_tokens": prompt_tokens}
    row |= {"memory_size": size, "query_size": 0, "eviction": policy, "max_prompt_tokens": None, "chunk": 512}
    about = {"name": "passkey", "seed": 0, "model": "a model", "config_hash": f"{policy}{size}"}
    return about | {"questions": {"words": 720, "seed": 0}, "metrics": {"test": [row]}}


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
