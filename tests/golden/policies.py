"""Policies of the golden folder's memories, from their parameters (evict_policies.json)."""

from __future__ import annotations

from typing import Any

from trime.eviction.base import EvictionPolicy
from trime.eviction.fifo import FIFO
from trime.eviction.initial import BelowMean, Constant, Initial, OwnPosition
from trime.eviction.lfa import LFA
from trime.eviction.lfu import LFU
from trime.eviction.lra_last import LRALast
from trime.eviction.lra_max import LRAMax
from trime.eviction.lra_sum import LRASum
from trime.eviction.lru import LRU
from trime.eviction.reading import Raw, Softmax
from trime.eviction.sink import Sink


def initial(given: list[Any]) -> Initial:
    kinds: dict[str, Any] = {"mean_std": BelowMean, "const": Constant, "own_position": OwnPosition}
    return kinds[given[0]](*given[1:])


def policy_of(given: dict[str, Any]) -> EvictionPolicy:
    start, newest_first = initial(given["init"]), given["tie"] == "newer"
    reading = Softmax() if given["score"] == "softmax" else Raw()
    heads = "max" if given["head_agg"] == "max" else "sum"
    made = {
        "fifo": FIFO,
        "sink": lambda: Sink(given["n_sink"]),
        "lru": lambda: LRU(start, given["topk"], newest_first),
        "lfu": lambda: LFU(start, given["topk"], given["count"], newest_first),
        "lra_last": lambda: LRALast(start, reading, heads, newest_first),
        "lra_max": lambda: LRAMax(start, reading, newest_first),
        "lra_sum": lambda: LRASum(start, reading, newest_first),
        "lfa": lambda: LFA(start, reading, given["gamma"], given["lfa_init"] == "replace", newest_first),
    }
    return made[given["kind"]]()
