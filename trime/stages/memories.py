"""The memories that an experiment's rows use at test, as conf/test_memories describes them, and the artefacts they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import plain, write_json
from trime.common.metrics import ResourceUsage
from trime.config import schema
from trime.config.check import parse_as
from trime.data.segments import document_offsets
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.scoring.rows import MixtureSpecs, traits_of
from trime.scoring.scorer import memory_names
from trime.stages.encode import Encode
from trime.stages.index import BuildIndex, ExternalStore, check_faiss, check_index, check_index_factory
from trime.stages.model_io import ModelSettings, check_positions
from trime.stages.prepare import Prepare
from trime.token_memory.search.datastore import Datastore, check_k
from trime.token_memory.search.index import AUTO
from trime.token_memory.test.base import Memory, MemoryTraits, StateScope
from trime.token_memory.test.external import ExternalMemory
from trime.token_memory.test.ngrams import Ngrams, SuffixArray, TextNgrams

FILES = ("text", "order", "starts", "ends")
SEARCH = ("k", "nprobe", "rescore")  # the settings that decide the result of a search


@dataclass(frozen=True, eq=False, repr=False)
class Suffixes(Artefact):
    """A suffix array in ``order.npy`` and ``starts.npy``, and its text with a separator after each document."""

    kind, stage, format, summary_file = "suffixes", "index", 2, "suffixes.json"

    text: Prepare
    split: str
    bounded: bool  # documents are separate; else the text is one stream
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        meter, corpus = ResourceUsage(), self.text.corpus()
        text = corpus.split(self.split)
        offsets = document_offsets(text, self.bounded)
        array = SuffixArray.build(text.tokens, len(corpus.vocabulary), offsets)
        for name, column in zip(FILES, (array.text, array.suffixes, array.starts, array.ends), strict=True):
            np.save(folder / f"{name}.npy", column)
        content = {"tokens": len(text.tokens), "text": corpus.fingerprint(self.split), "seconds": round(meter.seconds, 1)}
        write_json(folder / "suffixes.json", content)

    def array(self) -> SuffixArray:
        """Return the suffix array, with its text memory-mapped."""
        text, order, starts, ends = (np.load(self.path() / f"{name}.npy", mmap_mode="r") for name in FILES)
        return SuffixArray(text, order, np.array(starts), np.array(ends))


@dataclass(frozen=True)
class Sources:
    """Functions of this run that prepare and encode the text of memories.

    ``text`` returns the prepared text that the section ``datastore`` of a configuration names, ``store`` its contexts, encoded
    by the run's model. ``largest_k``: the most entries that any pass retrieves, if that is not index.k.
    """

    config: DictConfig
    text: Callable[[DictConfig], Prepare]
    store: Callable[[DictConfig], Artefact]
    lab: Lab
    largest_k: int | None = None


class StoredMemory(MemoryTraits, ABC):
    """A memory that is read from artefacts; memories without artefacts are instantiated directly.

    The run gives it ``name`` and ``sources``, and its yaml all other arguments, as plain data.
    """

    def __init__(self, name: str, sources: Sources):
        self.name, self.sources, self.config = name, sources, sources.config

    @cached_property
    def text(self) -> Prepare:
        """The prepared text that entries are from."""
        return self.sources.text(self.config)

    @property
    def split(self) -> str:
        """The split of the text that entries are from."""
        return str(self.config.datastore.split)

    @abstractmethod
    def needs(self) -> list[Artefact]:
        """Return the artefacts that the memory is read from."""

    @abstractmethod
    def open(self, queries: dict[str, Any]) -> Memory:
        """Return the memory for the queries of an encoded split, whose description is ``queries``."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the fingerprint of the text that the memory holds, once its artefacts are there."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that decide its masses, beside those of its artefacts."""

    def check_settings(self) -> None:
        """Raise UserError at a setting that cannot work; nothing has been made yet."""

    def check_text(self) -> None:
        """Raise UserError if the memory cannot be made of its text, which is prepared; no model has been trained yet."""

    def description(self) -> dict[str, Any] | None:
        """Return the content of results.json on the memory, without its recall; None for nothing."""
        return None

    def place(self, number: int) -> tuple[int, int] | None:
        """Return document and position of an entry in the split, by its number; None if that text is not available.

        Here it is the number of a token in the split.
        """
        offsets = self.text.corpus().split(self.split).offsets
        document = int(np.searchsorted(offsets, number, side="right")) - 1
        return document, number - int(offsets[document])


class DatastoreMemory(StoredMemory):
    """The nearest entries of a datastore, with the settings datastore.* and index.*.

    ``datastore`` and ``index``: settings of just this memory, in place of those in the sections of the same name, so that
    several memories of an experiment can search different text by different indexes.
    """

    is_searched = True

    def __init__(
        self,
        name: str,
        sources: Sources,
        datastore: dict[str, Any] | None = None,
        index: dict[str, Any] | None = None,
    ):
        super().__init__(name, sources)
        self.changed = {"datastore": datastore or {}, "index": index or {}}
        for section, settings in self.changed.items():
            if unknown := settings.keys() - self.config[section].keys():
                known = ", ".join(map(str, self.config[section]))
                raise UserError(f"test_memories.{name}.{section}.{min(unknown)}: there is no such setting: choose from {known}")
        # Another dataset replaces the section's: the settings of the two would be merged.
        cleared = {"datastore": {"dataset": None}} if "dataset" in self.changed["datastore"] else {}
        self.config = OmegaConf.merge(self.config, cleared, self.changed)  # type: ignore[assignment]

    @property
    def metric(self) -> str:  # type: ignore[override]
        return str(self.config.index.metric)

    @cached_property
    def store(self) -> Artefact:
        """The encoded text: made by this run, or the folder that ``datastore.path=DIR`` names."""
        return self.sources.store(self.config)

    @cached_property
    def index(self) -> BuildIndex:
        """The index of the encoded text."""
        k = None if "k" in self.changed["index"] else self.sources.largest_k
        settings = parse_as(schema.Index, plain(self.config.index), "index")
        return BuildIndex(self.store, settings, k or settings.k, self.sources.lab)

    @property
    def split(self) -> str:
        return self.store.identity()["split"] if isinstance(self.store, ExternalStore) else super().split

    def needs(self) -> list[Artefact]:
        return [self.index]

    def open(self, queries: dict[str, Any]) -> Memory:
        return ExternalMemory(self.index.knn_memory(queries), self.index.summary()["bytes"])

    def fingerprint(self) -> str:
        return str(self.store.summary()["text"])

    def settings(self) -> dict[str, Any]:
        return {name: self.config.index[name] for name in SEARCH}

    def check_settings(self) -> None:
        if self.config.index.factory not in (None, AUTO) and "index" in self.config.stages:  # with auto, its size decides
            check_faiss(self.config.index.factory)
        own = f"test_memories.{self.name}." if any(self.changed.values()) else ""  # else its settings are those of the sections
        for section, kind in (("datastore", schema.Datastore), ("index", schema.Index)) if own else ():
            parse_as(kind, plain(self.config[section]), f"{own}{section}")
        try:
            check_index_factory(self.config)
        except UserError as error:
            raise UserError(f"{own}{error}") from None

    def check_text(self) -> None:
        if not isinstance(self.store, Encode):  # else it was encoded already
            return
        entries, model = self.store.windows(self.text.corpus()).scored(), self.config.model
        check_k(self.index.largest_k, entries)
        if not self.config.checkpoint:
            reads = ModelSettings.of(self.config)
            lengths = {} if reads.reads_any_length else self.store.windowing.lengths()
            check_positions(model.backbone.get("positions"), lengths, reads.is_pretrained)
            if width := model.get("width"):
                check_index(self.config.index, entries, width)

    def description(self) -> dict[str, Any]:
        source, of_section = self.store.summary(), self.config.datastore
        # Without one of these, it is the text that the model learned from.
        text = {"text": source["text"]} if of_section.path or of_section.dataset else {}
        return self.index.summary() | {"dataset": source["dataset"], "split": source["split"]} | text

    @cached_property
    def token_numbers(self) -> tuple[Any, Any, Any] | None:
        """Document and position of every entry, and the first token of each document; None without the datastore's text."""
        corpus = self.text.corpus()
        if self.fingerprint() != corpus.fingerprint(self.split):
            return None
        store = Datastore(self.store.path())
        return store.document, store.keys.shards.column("position"), corpus.split(self.split).offsets

    def place(self, number: int) -> tuple[int, int] | None:
        if self.token_numbers is None:
            return None
        document, position, offsets = self.token_numbers
        # With evaluate.bounded=false the datastore has one document, whose positions go on through those of the text.
        return super().place(int(offsets[int(document[number])]) + int(position[number]))


class TextNgram(StoredMemory):
    """n-grams of the whole text of datastore.split, even if the datastore holds only some of its tokens."""

    state_scope = Ngrams.state_scope

    def __init__(self, name: str, sources: Sources, orders: list[int]):
        super().__init__(name, sources)
        self.orders = orders

    @cached_property
    def suffixes(self) -> Suffixes:
        """The suffix array of the text."""
        return Suffixes(self.text, self.split, self.config.evaluate.bounded, self.text.lab)

    def needs(self) -> list[Artefact]:
        return [self.suffixes]

    def settings(self) -> dict[str, Any]:
        return {"orders": self.orders}

    def fingerprint(self) -> str:
        return str(self.suffixes.summary()["text"])

    def open(self, queries: dict[str, Any]) -> Memory:
        if self.fingerprint() == queries["text"]:
            raise UserError(
                f"memory {self.name}: its text is the {queries['split']} split that is scored, so that it would know the "
                f"answers: choose another datastore.split, or leave {self.name} out of evaluate.memories"
            )
        return TextNgrams(self.suffixes.array(), self.orders)


class Memories:
    """All memories that the rows of a table use, by name, in the order of the configuration."""

    def __init__(self, table: MixtureSpecs, sources: Sources):
        used = memory_names(table)
        self.sources = sources
        self.nodes = {name: node for name, node in sources.config.test_memories.items() if name in used}

    @cached_property
    def kinds(self) -> dict[str, Memory | StoredMemory]:
        """Each memory, or the object that opens it if it is read from artefacts."""
        return {name: self.kind(name) for name in self.nodes}

    def kind(self, name: str, **changed: Any) -> Memory | StoredMemory:
        """Return a new memory of this name, or the object that opens it, with some settings changed."""
        kind = traits_of(self.sources.config, name)
        if issubclass(kind, StoredMemory):  # its settings stay plain data: they describe artefacts
            settings = {key: value for key, value in plain(self.nodes[name]).items() if not key.startswith("_")}
            return kind(name, self.sources, **settings)
        return build(self.nodes[name], **changed)

    @cached_property
    def stored(self) -> dict[str, StoredMemory]:
        """The memories that are read from artefacts, by name."""
        return {name: kind for name, kind in self.kinds.items() if isinstance(kind, StoredMemory)}

    @property
    def datastores(self) -> list[DatastoreMemory]:
        """The memories that search a datastore."""
        return [kind for kind in self.kinds.values() if isinstance(kind, DatastoreMemory)]

    def state_scope(self, names: Iterable[str]) -> StateScope:
        """Return the widest scope of the state of the named memories."""
        return max((self.kinds[name].state_scope for name in names), default=StateScope.NONE)

    def has_sizes(self, names: Iterable[str]) -> bool:
        """Return whether the size of any of the named memories is tuned."""
        return any("sizes" in self.nodes[name] for name in names)

    def needs(self) -> list[Artefact]:
        """Return the artefacts that the memories are read from."""
        return [need for stored in self.stored.values() for need in stored.needs()]

    def artefacts(self, stage: str) -> list[Artefact]:
        """Return all artefacts of a stage that the memories are read from, directly or not."""
        found = dict.fromkeys(each for need in self.needs() for each in need.with_needs())
        return [artefact for artefact in found if artefact.stage == stage]

    def open_all(self, queries: dict[str, Any], sizes: list[int], names: set[str]) -> dict[str, Memory]:
        """Return the named memories for the queries of an encoded split, tuned ones at ``sizes`` unless there are none."""
        memories = {}
        for name in (name for name in self.nodes if name in names):
            kind = self.stored.get(name) or self.kind(name, **({"sizes": sizes} if sizes and self.has_sizes([name]) else {}))
            memories[name] = kind.open(queries) if isinstance(kind, StoredMemory) else kind
        return memories

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the masses of each memory, beside those of their artefacts."""
        stored = {name: {"_target_": self.nodes[name]._target_} | kind.settings() for name, kind in self.stored.items()}
        return {name: stored.get(name) or plain(node) for name, node in self.nodes.items()}
