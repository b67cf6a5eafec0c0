"""Policies for the golden vectors of memories, from their parameters (evict_policies.json)."""

from __future__ import annotations

from typing import Any

from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.fifo import FIFO
from trime.kv.eviction.initial import BelowMean, Constant, Initial, OwnPosition
from trime.kv.eviction.lfa import LFA
from trime.kv.eviction.lfu import LFU
from trime.kv.eviction.lra_last import LRALast
from trime.kv.eviction.lra_max import LRAMax
from trime.kv.eviction.lra_sum import LRASum
from trime.kv.eviction.lru import LRU
from trime.kv.eviction.score_transform import Raw, Softmax
from trime.kv.eviction.sink import Sink


def initial(name_and_arguments: list[Any]) -> Initial:
    """Return the rule for initial scores that a case names, with its arguments."""
    kinds: dict[str, Any] = {"mean_std": BelowMean, "const": Constant, "own_position": OwnPosition}
    name, *arguments = name_and_arguments
    return kinds[name](*arguments)


def policy_of(parameters: dict[str, Any]) -> EvictionPolicy:
    """Return the policy of a case."""
    start, newest_first = initial(parameters["init"]), parameters["tie"] == "newer"
    score_transform = Softmax() if parameters["score"] == "softmax" else Raw()
    heads = "max" if parameters["head_agg"] == "max" else "sum"
    factories = {
        "fifo": FIFO,
        "sink": lambda: Sink(parameters["n_sink"]),
        "lru": lambda: LRU(start, parameters["topk"], newest_first, fallback_top_k=None),
        "lfu": lambda: LFU(start, parameters["topk"], parameters["count"], newest_first, fallback_top_k=None),
        "lra_last": lambda: LRALast(start, score_transform, heads, newest_first),
        "lra_max": lambda: LRAMax(start, score_transform, newest_first),
        "lra_sum": lambda: LRASum(start, score_transform, newest_first),
        "lfa": lambda: LFA(start, score_transform, parameters["gamma"], parameters["lfa_init"] == "replace", newest_first),
    }
    return factories[parameters["kind"]]()
