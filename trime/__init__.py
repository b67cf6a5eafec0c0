"""TRIME Lab: language models with local, long-term and external memory, and their baselines.

As a library, a name is imported when it is first used; ``import trime`` by itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trime.bundle.loaded_model import load
    from trime.data.neighbours import BM25 as BM25Neighbours  # noqa: N811 (ruff takes a class of capitals for a constant)
    from trime.kv.budgets import AdaKV, pyramid
    from trime.kv.evicting_cache import EvictingCache
    from trime.kv.eviction.fifo import FIFO
    from trime.kv.eviction.h2o import H2O
    from trime.kv.eviction.initial import BelowMean, Constant, OwnPosition
    from trime.kv.eviction.key_norm import KeyNorm
    from trime.kv.eviction.kvzip import KVzip, repeats
    from trime.kv.eviction.lfa import LFA
    from trime.kv.eviction.lfu import LFU
    from trime.kv.eviction.lra_last import LRALast
    from trime.kv.eviction.lra_max import LRAMax
    from trime.kv.eviction.lra_sum import LRASum
    from trime.kv.eviction.lru import LRU
    from trime.kv.eviction.score_transform import Clipped, Raw, Softmax
    from trime.kv.eviction.sink import Sink
    from trime.kv.eviction.snapkv import SnapKV
    from trime.kv.eviction.tova import TOVA
    from trime.kv.recall.base import Gaussian, Quest
    from trime.kv.recall.store import Recall
    from trime.scoring.memory_mixture import MemoryMixture, window_of
    from trime.scoring.mixtures.adaptive import Adaptive
    from trime.scoring.mixtures.calibrated import Calibrated
    from trime.scoring.mixtures.joint import interpolate, joint_log_prob
    from trime.text_memory.memory import TextMemory
    from trime.token_memory.search.datastore import Datastore, KNNMemory
    from trime.token_memory.test.base import Memory, Window
    from trime.token_memory.test.external import ExternalMemory
    from trime.token_memory.test.local import LocalMemory
    from trime.token_memory.test.long import LongMemory
    from trime.token_memory.train.visibility import External, Local, Long, Others
    from trime.training.trime_loss import trime_loss

__version__ = "0.2.0"
__all__ = [
    "FIFO",
    "H2O",
    "LFA",
    "LFU",
    "LRU",
    "TOVA",
    "AdaKV",
    "Adaptive",
    "BM25Neighbours",
    "BelowMean",
    "Calibrated",
    "Clipped",
    "Constant",
    "Datastore",
    "EvictingCache",
    "External",
    "ExternalMemory",
    "Gaussian",
    "KNNMemory",
    "KVzip",
    "KeyNorm",
    "LRALast",
    "LRAMax",
    "LRASum",
    "Local",
    "LocalMemory",
    "Long",
    "LongMemory",
    "Memory",
    "MemoryMixture",
    "Others",
    "OwnPosition",
    "Quest",
    "Raw",
    "Recall",
    "Sink",
    "SnapKV",
    "Softmax",
    "TextMemory",
    "Window",
    "interpolate",
    "joint_log_prob",
    "load",
    "pyramid",
    "repeats",
    "trime_loss",
    "window_of",
]
DEFINED_IN = {
    "FIFO": "trime.kv.eviction.fifo",
    "H2O": "trime.kv.eviction.h2o",
    "LFA": "trime.kv.eviction.lfa",
    "LFU": "trime.kv.eviction.lfu",
    "LRU": "trime.kv.eviction.lru",
    "TOVA": "trime.kv.eviction.tova",
    "AdaKV": "trime.kv.budgets",
    "Adaptive": "trime.scoring.mixtures.adaptive",
    "BM25Neighbours": "trime.data.neighbours",
    "BelowMean": "trime.kv.eviction.initial",
    "Calibrated": "trime.scoring.mixtures.calibrated",
    "Clipped": "trime.kv.eviction.score_transform",
    "Constant": "trime.kv.eviction.initial",
    "Datastore": "trime.token_memory.search.datastore",
    "EvictingCache": "trime.kv.evicting_cache",
    "External": "trime.token_memory.train.visibility",
    "ExternalMemory": "trime.token_memory.test.external",
    "Gaussian": "trime.kv.recall.base",
    "KNNMemory": "trime.token_memory.search.datastore",
    "KVzip": "trime.kv.eviction.kvzip",
    "KeyNorm": "trime.kv.eviction.key_norm",
    "LRALast": "trime.kv.eviction.lra_last",
    "LRAMax": "trime.kv.eviction.lra_max",
    "LRASum": "trime.kv.eviction.lra_sum",
    "Local": "trime.token_memory.train.visibility",
    "LocalMemory": "trime.token_memory.test.local",
    "Long": "trime.token_memory.train.visibility",
    "LongMemory": "trime.token_memory.test.long",
    "Memory": "trime.token_memory.test.base",
    "MemoryMixture": "trime.scoring.memory_mixture",
    "Others": "trime.token_memory.train.visibility",
    "OwnPosition": "trime.kv.eviction.initial",
    "Quest": "trime.kv.recall.base",
    "Raw": "trime.kv.eviction.score_transform",
    "Recall": "trime.kv.recall.store",
    "Sink": "trime.kv.eviction.sink",
    "SnapKV": "trime.kv.eviction.snapkv",
    "Softmax": "trime.kv.eviction.score_transform",
    "TextMemory": "trime.text_memory.memory",
    "Window": "trime.token_memory.test.base",
    "interpolate": "trime.scoring.mixtures.joint",
    "joint_log_prob": "trime.scoring.mixtures.joint",
    "load": "trime.bundle.loaded_model",
    "pyramid": "trime.kv.budgets",
    "repeats": "trime.kv.eviction.kvzip",
    "trime_loss": "trime.training.trime_loss",
    "window_of": "trime.scoring.memory_mixture",
}
ALIASES = {"BM25Neighbours": "BM25"}  # names that differ where they are defined


def __getattr__(name: str) -> Any:
    """Import a part of the library when it is first used."""
    if name not in DEFINED_IN:
        raise AttributeError(f"module trime has no attribute {name}")
    value = globals()[name] = getattr(import_module(DEFINED_IN[name]), ALIASES.get(name, name))
    return value


def __dir__() -> list[str]:
    """Return the names that are imported already, and those that can be."""
    return sorted([*globals(), *__all__])
