"""The memories of an experiment's rows, as conf/memories describes them, and the artefacts that they are read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.io import plain
from trime.memory.base import Memory
from trime.memory.external import ExternalMemory
from trime.memory.ngrams import TextNgrams
from trime.pipeline.artefact import Artefact
from trime.pipeline.rows import memories_of
from trime.stages.datastore import Index
from trime.stages.prepare import Prepare
from trime.stages.suffixes import Suffixes
from trime.types import UserError


@dataclass(frozen=True)
class Sources:
    """What memories are made from: the index of the datastore, where some row wants it, and the text that it is of."""

    index: Index | None
    text: Prepare


class StoredMemory(ABC):
    """A memory that is read from artefacts. (One that is not is instantiated as it is.)"""

    @abstractmethod
    def needs(self, sources: Sources) -> list[Artefact]:
        """Return the artefacts."""

    @abstractmethod
    def opened(self, sources: Sources, asked: dict[str, Any]) -> Memory:
        """Return the memory, for the contexts of an encoded split (its description)."""


class External(StoredMemory):
    """The nearest entries of a datastore; its settings are index= and datastore.*."""

    def needs(self, sources: Sources) -> list[Artefact]:
        return [sources.index] if sources.index else []

    def opened(self, sources: Sources, asked: dict[str, Any]) -> Memory:
        assert sources.index is not None
        return ExternalMemory(sources.index.nearest(asked), sources.index.statistics()["bytes"])


class TextNgram(StoredMemory):
    """n-grams of all the text of datastore.split, however few of its tokens the datastore holds."""

    def __init__(self, orders: list[int]):
        self.orders = orders

    def suffixes(self, sources: Sources) -> Suffixes:
        """Return the suffix array of the text."""
        config = sources.text.config
        return Suffixes(config, sources.text, config.datastore.split)

    def needs(self, sources: Sources) -> list[Artefact]:
        return [self.suffixes(sources)]

    def opened(self, sources: Sources, asked: dict[str, Any]) -> Memory:
        suffixes = self.suffixes(sources)
        if suffixes.information()["text"] == asked["text"]:
            raise UserError(
                f"memory ngram: its text is the {asked['split']} split that is scored, which it would know by heart: "
                "choose another datastore.split, or leave ngram out of evaluate.memories"
            )
        return TextNgrams(suffixes.array(), self.orders)


class Memories:
    """Those that some row names, by name."""

    def __init__(self, config: DictConfig, sources: Sources):
        self.config, self.sources = config, sources

    @cached_property
    def names(self) -> list[str]:
        """In the order of the configuration."""
        named = memories_of(self.config)
        return [name for name in self.config.memories if name in named]

    def needs(self) -> list[Artefact]:
        """Return what they are read from."""
        kinds = [self.kind(name, []) for name in self.names]
        return [need for kind in kinds if isinstance(kind, StoredMemory) for need in kind.needs(self.sources)]

    def opened(self, asked: dict[str, Any], sizes: list[int], names: set[str]) -> dict[str, Memory]:
        """Return some memories, for the contexts of an encoded split; ``sizes`` are those that the long memory has at once."""
        found = {}
        for name in (name for name in self.names if name in names):
            kind = self.kind(name, sizes)
            found[name] = kind.opened(self.sources, asked) if isinstance(kind, StoredMemory) else kind
        return found

    def kind(self, name: str, sizes: list[int]) -> Memory | StoredMemory:
        """Return what the configuration of a memory describes."""
        node = self.config.memories[name]
        sized = {"sizes": sizes} if "sizes" in node and sizes else {}
        return instantiate(node, _convert_="all", **sized)

    def settings(self) -> dict[str, Any]:
        """Return the configuration of each."""
        return {name: plain(self.config.memories[name]) for name in self.names}
