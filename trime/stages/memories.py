"""The memories that an experiment's rows use at test, as conf/test_memories describes them, and the artefacts they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.errors import UserError
from trime.evaluation.scorer import memory_names
from trime.io import plain
from trime.memory.base import Carried, Memory
from trime.memory.external import ExternalMemory
from trime.memory.ngrams import Ngrams, TextNgrams
from trime.pipeline.artefact import Artefact
from trime.pipeline.rows import MixtureSpecs
from trime.pipeline.settings import Configured, plain_settings
from trime.stages.datastore import BuildIndex
from trime.stages.prepare import PreparedText
from trime.stages.suffixes import Suffixes

SEARCH = ("index.k", "index.nprobe", "index.rescore")  # the settings that decide what a search of the index returns


@dataclass(frozen=True)
class Sources:
    """What memories are made from: the index of the datastore, if a row uses it, and the text of the datastore.

    ``bounded``: documents are separate; else the text is one stream.
    """

    index: BuildIndex | None
    text: PreparedText
    split: str
    bounded: bool


class StoredMemory(ABC):
    """A memory that is read from artefacts; memories without artefacts are instantiated directly."""

    carries: Carried = Carried.NOTHING  # of the opened memory

    @abstractmethod
    def needs(self, sources: Sources) -> list[Artefact]:
        """Return the artefacts that the memory is read from."""

    @abstractmethod
    def open(self, sources: Sources, queries: dict[str, Any]) -> Memory:
        """Return the memory for the queries of an encoded split, whose description is ``queries``."""


class DatastoreMemory(StoredMemory):
    """The nearest entries of a datastore, with the settings index= and datastore.*."""

    def needs(self, sources: Sources) -> list[Artefact]:
        return [sources.index] if sources.index else []

    def open(self, sources: Sources, queries: dict[str, Any]) -> Memory:
        assert sources.index is not None
        return ExternalMemory(sources.index.knn_memory(queries), sources.index.summary()["bytes"])


class TextNgram(StoredMemory):
    """n-grams of the whole text of datastore.split, even if the datastore holds only some of its tokens."""

    carries = Ngrams.carries

    def __init__(self, orders: list[int]):
        self.orders = orders

    def suffixes(self, sources: Sources) -> Suffixes:
        """Return the suffix array of the text."""
        return Suffixes(sources.text.config, sources.text, sources.split, sources.bounded)

    def needs(self, sources: Sources) -> list[Artefact]:
        return [self.suffixes(sources)]

    def open(self, sources: Sources, queries: dict[str, Any]) -> Memory:
        suffixes = self.suffixes(sources)
        if suffixes.summary()["text"] == queries["text"]:
            raise UserError(
                f"memory ngram: its text is the {queries['split']} split that is scored, so that it would know the answers: "
                "choose another datastore.split, or leave ngram out of evaluate.memories"
            )
        return TextNgrams(suffixes.array(), self.orders)


class Memories(Configured):
    """All memories that a row of the table uses, by name."""

    unhashed = ("test_memories", *SEARCH)  # settings() has those of the memories in use

    def __init__(self, config: DictConfig, table: MixtureSpecs, sources: Sources):
        super().__init__(config)
        self.sources = sources
        used = memory_names(table)
        self.names = [name for name in self.config.test_memories if name in used]  # in the order of the configuration

    def stored(self) -> dict[str, StoredMemory]:
        """Return the memories that are read from artefacts, by name."""
        kinds = {name: self.kind(name, []) for name in self.names}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, StoredMemory)}

    def carried(self, names: set[str]) -> Carried:
        """Return what of the text read so far any of the named memories carries to the next window."""
        return max((self.kind(name, []).carries for name in names), default=Carried.NOTHING)

    def needs(self) -> list[Artefact]:
        """Return the artefacts that the memories are read from."""
        return [need for kind in self.stored().values() for need in kind.needs(self.sources)]

    def open_all(self, queries: dict[str, Any], sizes: list[int], names: set[str]) -> dict[str, Memory]:
        """Return the named memories for the queries of an encoded split; ``sizes`` are those of the long memory."""
        memories = {}
        for name in (name for name in self.names if name in names):
            kind = self.kind(name, sizes)
            memories[name] = kind.open(self.sources, queries) if isinstance(kind, StoredMemory) else kind
        return memories

    def kind(self, name: str, sizes: list[int]) -> Memory | StoredMemory:
        """Return the memory of this name, or what opens it if it is read from artefacts."""
        node = self.config.test_memories[name]
        sized = {"sizes": sizes} if "sizes" in node and sizes else {}
        return instantiate(node, _convert_="all", **sized)

    def settings(self) -> dict[str, Any]:
        """Return what decides the masses of each memory: its configuration, and how the index is searched."""
        settings = {name: plain(self.config.test_memories[name]) for name in self.names}
        index = plain_settings(self.config, SEARCH) if "external" in self.names else {}
        return settings | index
