"""Results of runs that were never made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trime.report.groups import Group, group_runs
from trime.report.run_result import ScoredRun, run_from_json, scored_runs


def scored(content: dict[str, Any]) -> ScoredRun:
    """Return the results of a run that scored a text."""
    (run,) = scored_runs([run_from_json(content)])
    return run


def group_of(contents: Iterable[dict[str, Any]]) -> Group:
    """Return one group of some results."""
    return Group([*map(scored, contents)])


def grouped(contents: Iterable[dict[str, Any]]) -> list[Group]:
    """Return the groups of some results."""
    return group_runs([*map(scored, contents)])


def answered(policy: str, size: int, share: float) -> dict[str, Any]:
    """Return an answering run with this share of answers to 50 questions of 1,000 tokens."""
    row: dict[str, Any] = {"exact_match": share, "contained": share, "questions": 50, "prompt_tokens": 1000}
    row |= {"memory_size": size, "query_size": 0, "eviction": policy, "max_prompt_tokens": None, "chunk": 512}
    about = {"name": "passkey", "seed": 0, "model": "a model", "config_hash": f"{policy}{size}"}
    return about | {"questions": {"words": 720, "seed": 0}, "metrics": {"test": [row]}}


def made(
    name: str, seed: int, losses: list[float], policy: str | None = None, size: int | list[int] | None = None
) -> dict[str, Any]:
    """Return a run with one document of 100 tokens for each loss."""
    loss = sum(losses) / len(losses)
    row = {"memories": "vocabulary", "tuned": {}, "loss": loss, "perplexity": math.exp(loss), "tokens": 100 * len(losses)}
    row |= {"documents": [[100 * of_document, 100] for of_document in losses], "search": None, "memory_size": size}
    row |= {"eviction": policy, "tokens_per_second": 1000.0, "peak_memory_mb": 500.0}
    about = {"name": name, "seed": seed, "config_hash": f"{name}{seed}{policy}{size}", "parameters": 1000}
    about |= {"dataset": {"name": "text", "fingerprint": "f"}, "train": {"updates": 10, "tokens_per_second": 100.0}}
    return about | {"metrics": {"valid": [row], "test": [row]}}
