"""TRIME Lab: language models with local, long-term and external memory, and their baselines.

As a library, a part is imported when it is first used; ``import trime`` alone imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trime.bundle.loaded_model import load
    from trime.data.neighbours import Fast as BM25Neighbours
    from trime.evaluation.memory_mixture import MemoryMixture, window_of
    from trime.eviction.fifo import FIFO
    from trime.eviction.h2o import H2O
    from trime.eviction.initial import BelowMean, Constant, OwnPosition
    from trime.eviction.key_norm import KeyNorm
    from trime.eviction.lfa import LFA
    from trime.eviction.lfu import LFU
    from trime.eviction.lra_last import LRALast
    from trime.eviction.lra_max import LRAMax
    from trime.eviction.lra_sum import LRASum
    from trime.eviction.lru import LRU
    from trime.eviction.score_transform import Clipped, Raw, Softmax
    from trime.eviction.sink import Sink
    from trime.eviction.snapkv import SnapKV
    from trime.eviction.tova import TOVA
    from trime.memory.base import Memory, Window
    from trime.memory.external import ExternalMemory
    from trime.memory.local import LocalMemory
    from trime.memory.long import LongMemory
    from trime.memory.retrieval.datastore import Datastore, KNNMemory
    from trime.memory.visibility import External, Local, Long, Others
    from trime.mixtures.adaptive import Adaptive
    from trime.mixtures.calibrated import Calibrated
    from trime.mixtures.joint import interpolate, joint_log_prob
    from trime.models.pretrained.evicting_cache import EvictingCache
    from trime.tasks.trime_loss import trime_loss

__version__ = "0.2.0"
__all__ = [
    "FIFO",
    "H2O",
    "LFA",
    "LFU",
    "LRU",
    "TOVA",
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
    "KNNMemory",
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
    "Raw",
    "Sink",
    "SnapKV",
    "Softmax",
    "Window",
    "interpolate",
    "joint_log_prob",
    "load",
    "trime_loss",
    "window_of",
]
DEFINED_IN = {
    "FIFO": "trime.eviction.fifo",
    "H2O": "trime.eviction.h2o",
    "LFA": "trime.eviction.lfa",
    "LFU": "trime.eviction.lfu",
    "LRU": "trime.eviction.lru",
    "TOVA": "trime.eviction.tova",
    "Adaptive": "trime.mixtures.adaptive",
    "BM25Neighbours": "trime.data.neighbours",
    "BelowMean": "trime.eviction.initial",
    "Calibrated": "trime.mixtures.calibrated",
    "Clipped": "trime.eviction.score_transform",
    "Constant": "trime.eviction.initial",
    "Datastore": "trime.memory.retrieval.datastore",
    "EvictingCache": "trime.models.pretrained.evicting_cache",
    "External": "trime.memory.visibility",
    "ExternalMemory": "trime.memory.external",
    "KNNMemory": "trime.memory.retrieval.datastore",
    "KeyNorm": "trime.eviction.key_norm",
    "LRALast": "trime.eviction.lra_last",
    "LRAMax": "trime.eviction.lra_max",
    "LRASum": "trime.eviction.lra_sum",
    "Local": "trime.memory.visibility",
    "LocalMemory": "trime.memory.local",
    "Long": "trime.memory.visibility",
    "LongMemory": "trime.memory.long",
    "Memory": "trime.memory.base",
    "MemoryMixture": "trime.evaluation.memory_mixture",
    "Others": "trime.memory.visibility",
    "OwnPosition": "trime.eviction.initial",
    "Raw": "trime.eviction.score_transform",
    "Sink": "trime.eviction.sink",
    "SnapKV": "trime.eviction.snapkv",
    "Softmax": "trime.eviction.score_transform",
    "Window": "trime.memory.base",
    "interpolate": "trime.mixtures.joint",
    "joint_log_prob": "trime.mixtures.joint",
    "load": "trime.bundle.loaded_model",
    "trime_loss": "trime.tasks.trime_loss",
    "window_of": "trime.evaluation.memory_mixture",
}
ALIASES = {"BM25Neighbours": "Fast"}  # names that differ where they are defined


def __getattr__(name: str) -> Any:
    """Import a part of the library when it is first used."""
    if name not in DEFINED_IN:
        raise AttributeError(f"module trime has no attribute {name}")
    value = globals()[name] = getattr(import_module(DEFINED_IN[name]), ALIASES.get(name, name))
    return value


def __dir__() -> list[str]:
    """Return what is imported already, and what can be."""
    return sorted([*globals(), *__all__])
