"""TRIME Lab: language models with local, long-term and external memory, and their baselines.

As a library, a part is imported when it is first used; ``import trime`` alone imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trime.bundle.loaded_model import load
    from trime.data.neighbours import BM25 as BM25Neighbours  # noqa: N811 (ruff takes a class of capitals for a constant)
    from trime.memory.inference.base import Memory, Window
    from trime.memory.inference.external import ExternalMemory
    from trime.memory.inference.local import LocalMemory
    from trime.memory.inference.long import LongMemory
    from trime.memory.recall.gaussian import Gaussian
    from trime.memory.recall.quest import Quest
    from trime.memory.recall.store import Recall
    from trime.memory.retrieval.datastore import Datastore, KNNMemory
    from trime.memory.slots.budgets.ada_kv import AdaKV
    from trime.memory.slots.budgets.pyramid import pyramid
    from trime.memory.slots.eviction.fifo import FIFO
    from trime.memory.slots.eviction.h2o import H2O
    from trime.memory.slots.eviction.initial import BelowMean, Constant, OwnPosition
    from trime.memory.slots.eviction.key_norm import KeyNorm
    from trime.memory.slots.eviction.kvzip import KVzip, repeats
    from trime.memory.slots.eviction.lfa import LFA
    from trime.memory.slots.eviction.lfu import LFU
    from trime.memory.slots.eviction.lra_last import LRALast
    from trime.memory.slots.eviction.lra_max import LRAMax
    from trime.memory.slots.eviction.lra_sum import LRASum
    from trime.memory.slots.eviction.lru import LRU
    from trime.memory.slots.eviction.score_transform import Clipped, Raw, Softmax
    from trime.memory.slots.eviction.sink import Sink
    from trime.memory.slots.eviction.snapkv import SnapKV
    from trime.memory.slots.eviction.tova import TOVA
    from trime.memory.training.visibility import External, Local, Long, Others
    from trime.models.pretrained.evicting_cache import EvictingCache
    from trime.scoring.memory_mixture import MemoryMixture, window_of
    from trime.scoring.mixtures.adaptive import Adaptive
    from trime.scoring.mixtures.calibrated import Calibrated
    from trime.scoring.mixtures.joint import interpolate, joint_log_prob
    from trime.text_memory.memory import TextMemory
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
    "FIFO": "trime.memory.slots.eviction.fifo",
    "H2O": "trime.memory.slots.eviction.h2o",
    "LFA": "trime.memory.slots.eviction.lfa",
    "LFU": "trime.memory.slots.eviction.lfu",
    "LRU": "trime.memory.slots.eviction.lru",
    "TOVA": "trime.memory.slots.eviction.tova",
    "AdaKV": "trime.memory.slots.budgets.ada_kv",
    "Adaptive": "trime.scoring.mixtures.adaptive",
    "BM25Neighbours": "trime.data.neighbours",
    "BelowMean": "trime.memory.slots.eviction.initial",
    "Calibrated": "trime.scoring.mixtures.calibrated",
    "Clipped": "trime.memory.slots.eviction.score_transform",
    "Constant": "trime.memory.slots.eviction.initial",
    "Datastore": "trime.memory.retrieval.datastore",
    "EvictingCache": "trime.models.pretrained.evicting_cache",
    "External": "trime.memory.training.visibility",
    "ExternalMemory": "trime.memory.inference.external",
    "Gaussian": "trime.memory.recall.gaussian",
    "KNNMemory": "trime.memory.retrieval.datastore",
    "KVzip": "trime.memory.slots.eviction.kvzip",
    "KeyNorm": "trime.memory.slots.eviction.key_norm",
    "LRALast": "trime.memory.slots.eviction.lra_last",
    "LRAMax": "trime.memory.slots.eviction.lra_max",
    "LRASum": "trime.memory.slots.eviction.lra_sum",
    "Local": "trime.memory.training.visibility",
    "LocalMemory": "trime.memory.inference.local",
    "Long": "trime.memory.training.visibility",
    "LongMemory": "trime.memory.inference.long",
    "Memory": "trime.memory.inference.base",
    "MemoryMixture": "trime.scoring.memory_mixture",
    "Others": "trime.memory.training.visibility",
    "OwnPosition": "trime.memory.slots.eviction.initial",
    "Quest": "trime.memory.recall.quest",
    "Raw": "trime.memory.slots.eviction.score_transform",
    "Recall": "trime.memory.recall.store",
    "Sink": "trime.memory.slots.eviction.sink",
    "SnapKV": "trime.memory.slots.eviction.snapkv",
    "Softmax": "trime.memory.slots.eviction.score_transform",
    "TextMemory": "trime.text_memory.memory",
    "Window": "trime.memory.inference.base",
    "interpolate": "trime.scoring.mixtures.joint",
    "joint_log_prob": "trime.scoring.mixtures.joint",
    "load": "trime.bundle.loaded_model",
    "pyramid": "trime.memory.slots.budgets.pyramid",
    "repeats": "trime.memory.slots.eviction.kvzip",
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
    """Return what is imported already, and what can be."""
    return sorted([*globals(), *__all__])
