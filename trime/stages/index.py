"""index: the search index over the encoded external corpus (TRIME section 5.2)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from trime.common.identity import Free
from trime.common.io import write_json
from trime.common.metrics import ResourceUsage
from trime.common.progress import Progress
from trime.common.urls import local_copy
from trime.config.schema import Index
from trime.data.corpus import Corpus, content_hash
from trime.data.duplicates import describe_duplicates, find_duplicates
from trime.errors import UserError, install_command
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.manifest import check_manifest
from trime.lab.shards import ShardedArtefact, Work
from trime.lab.stage import Stage
from trime.token_memory.search.datastore import Datastore, Keys, KNNMemory, Shards
from trime.token_memory.search.index import (
    AUTO,
    IndexSlice,
    build_slices,
    builder_of,
    cell_count,
    choose_factory,
    complete_factory,
    divides_by_cells,
    split_cells,
    split_entries,
)
from trime.token_memory.search.ivf import CELLS, CENTROIDS, assign_cells, cells_file
from trime.token_memory.search.ray_cluster import open_ray_search
from trime.token_memory.search.search import ExactSearch, Search, ShardedSearch, recall_of

log = logging.getLogger(__name__)

SAMPLE = 256  # stored keys used as queries to choose the number of cells that index=auto visits
MANY_ENTRIES = 2**30  # to try an index before there are any
GAIN = 0.01  # the gain of recall for which it visits twice as many cells


@dataclass(frozen=True, eq=False, repr=False)
class BuildIndex(ShardedArtefact):
    """A FAISS index file, or keys sorted by cells; a description only where search is exact by brute force.

    ``largest_k``: the largest K of any search, for which index=auto chooses how much to visit.
    """

    kind, stage, format = "datastore", "index", 2
    summary_file = "datastore.json"

    store: Artefact
    index: Free[Index]  # identity() has the settings that decide the index; the rest decide how it is searched
    largest_k: Free[int]
    lab: Free[Lab]

    def identity(self) -> Any:
        index = self.index
        chosen = {"recall": index.recall, "k": self.largest_k} if index.factory == AUTO else {}
        parts = 1 if str(index.factory).startswith("Cells") else index.parts  # index=auto decides only when it is built
        return super().identity() | {"factory": index.factory, "metric": index.metric, "parts": parts} | chosen

    def work(self, folder: Path) -> Work:
        """Return the work of an engine on an index of cells whose centroids are trained: the cells of the keys, by shard."""
        shards = Keys(Shards(self.store.path())).by_shard()
        files = [cells_file(folder, number) for number in range(len(shards))]

        def make(number: int, advance: Advance) -> None:
            assign_cells(shards[number], self.index.metric, folder / CENTROIDS, files[number])
            advance(len(shards[number]))

        return Work(files, [*map(len, shards)], make, in_order=len(shards) == 1)  # with all threads of this process

    def build(self, folder: Path) -> None:
        meter, store, index, stored = ResourceUsage(), self.store.path(), self.index, self.store.summary()
        entries = len(Keys(Shards(store)))
        factory = check_index(index, entries, stored["width"])
        slices = split_entries(store, slice_count(index, factory), folder, factory, index.metric)
        if factory:
            by_cells = divides_by_cells(factory) and not (folder / CELLS).exists()
            with Progress(total=entries, unit="key", unit_scale=True, desc=f"index {factory}") as bar:
                if by_cells:
                    builder_of(factory).train(Keys(Shards(store)), index.metric, folder)
                    self.lab.make_shards(self, self.work(folder), folder, bar)
                build_slices(slices, folder, Progress(disable=True) if by_cells else bar)
        files = [path for path in (*folder.rglob("*"), *store.iterdir()) if path.is_file()]
        # Descriptions hold no entries, and what was learned for the build is deleted after it.
        entries_in = [path for path in files if path.stem != "learned" and path.suffix not in (".json", ".txt")]
        content = {
            "entries": entries,
            "bytes": sum(path.stat().st_size for path in entries_in),
            "index": factory or "exact",
            "metric": index.metric,
            "build_seconds": round(meter.seconds + stored["seconds"], 1),
        }
        if index.factory == AUTO:
            content |= self.choose_nprobe(slices)
        write_json(folder / "datastore.json", content)
        for file in folder.glob("learned.*"):
            file.unlink()

    def choose_nprobe(self, slices: list[IndexSlice]) -> dict[str, Any]:
        """Return the number of cells to visit so that stored keys reach ``index.recall`` as queries, and their recall.

        The number is doubled until recall suffices, or hardly grows because the codes of a product quantiser limit it.
        """
        factory, target, metric = slices[0].factory, self.index.recall, self.index.metric
        if not factory:
            return {"nprobe": 1, "expected_recall": 1.0}
        keys = Keys(Shards(self.store.path()))
        spread = torch.arange(0, len(keys), max(1, len(keys) // SAMPLE))[:SAMPLE]
        queries, k = keys.take(spread[:, None]).squeeze(1), min(self.largest_k, len(keys))
        _, exact = ExactSearch(keys.blocks, metric).nearest(queries, k)

        def recall(nprobe: int) -> float:
            return recall_of(exact, open_search(slices, nprobe).nearest(queries, k)[1])

        nprobe, expected = 1, recall(1)
        while expected < target and nprobe < cell_count(factory):
            doubled = recall(2 * nprobe)
            if doubled < expected + GAIN:
                break
            nprobe, expected = 2 * nprobe, doubled
        log.info(f"index: index=auto chose {factory}, nprobe {nprobe}: recall {expected:.2f} expected of {len(keys):,} keys")
        return {"nprobe": nprobe, "expected_recall": expected}

    def summary(self) -> dict[str, Any]:
        """Return the description of the index, with the number of cells a search visits (chosen at build, or configured)."""
        built = super().summary()
        return built if built["index"] == "exact" else {"nprobe": self.index.nprobe} | built

    def search(self) -> Search:
        """Return the search over the index, in this process or on the workers of a Ray cluster."""
        index, built = self.index, self.summary()
        factory = None if built["index"] == "exact" else built["index"]
        slices = split_entries(self.store.path(), slice_count(index, factory), self.path(), factory, index.metric)
        nprobe = built.get("nprobe", index.nprobe)
        if index.engine == "local":
            return open_search(slices, nprobe, index.device)
        divided = split_cells(slices[0], index.parts) if divides_by_cells(factory) else slices
        return open_ray_search(divided, nprobe, index.device, index.address, index.cores, index.replicas)

    def knn_memory(self, queries: dict[str, Any]) -> KNNMemory:
        """Return the memory of the K nearest entries for the queries of an encoded split, whose description is ``queries``.

        UserError if the datastore holds that very split, and text without documents has no own entries to hide.
        """
        store, index, stored = Datastore(self.store.path()), self.index, self.store.summary()
        same = stored["text"] == queries["text"]
        if same and not (stored["bounded"] and queries["bounded"]):
            raise UserError(
                f"the datastore holds the {queries['split']} split that is scored, and with evaluate.bounded=false documents "
                "cannot be told apart: set evaluate.bounded=true, or another datastore.split"
            )
        return KNNMemory(store, self.search(), index.k, index.metric, index.rescore, hide_own=same)


def check_index(index: Any, entries: int, width: int) -> str | None:
    """Return the factory string for this many keys, None for exact search; UserError if they cannot be indexed with it."""
    if index.parts > entries:
        raise UserError(f"index.parts={index.parts} is more than the {entries} entries: lower it, or raise datastore.tokens")
    factory = index.factory
    factory = choose_factory(entries, width, index.parts) if factory == AUTO else complete_factory(factory, entries, width)
    if factory:
        check_faiss(factory)
        builder_of(factory).check(entries, width, index.metric)
    return factory


def check_faiss(factory: str) -> None:
    """Raise UserError if FAISS, which builds all indexes, is not installed."""
    if not find_spec("faiss"):
        raise UserError(f"index.factory={factory} needs FAISS: {install_command('cpu')}, or index=exact compares every key")


def check_index_factory(config: DictConfig) -> None:
    """Raise UserError if ``index.factory`` names no index for keys of the model's width, however many."""
    factory, width = config.index.factory, config.model.get("width")
    if factory not in (None, AUTO) and isinstance(width, int):  # a pretrained model's width is known when it is read
        builder_of(str(complete_factory(factory, MANY_ENTRIES, width))).check(MANY_ENTRIES, width, config.index.metric)


def slice_count(index: Any, factory: str | None) -> int:
    """Return the number of indexes to build: one for each slice, unless the search of a single one is divided by cells."""
    return 1 if divides_by_cells(factory) else int(index.parts)


def open_search(slices: list[IndexSlice], nprobe: int, device: str = "cpu") -> Search:
    """Return the search over all slices, in this process."""
    searches = [one.search(nprobe, device) for one in slices]
    return searches[0] if len(searches) == 1 else ShardedSearch(searches, [one.first for one in slices])


@dataclass(frozen=True, eq=False, repr=False)
class ExternalStore(Artefact):
    """A datastore that another run encoded with the same model."""

    kind = "encode"
    stage = "none of this run"
    summary_file = "encode.json"

    place: Free[str]
    model: Free[Artefact]
    lab: Free[Lab]

    def needs(self) -> list[Artefact]:
        return []

    @property
    def folder(self) -> Path:
        """The folder that ``datastore.path=`` names."""
        return local_copy(self.place)

    def identity(self) -> Any:
        remedy = "name an encode-… folder of a run in datastore.path="
        if not (self.folder / self.summary_file).is_file():
            raise UserError(f"datastore.path={self.folder} is not a datastore: {remedy}")
        check_manifest(self.folder, "encode-.*", remedy, self.lab.verify)
        return json.loads((self.folder / self.summary_file).read_text(encoding="utf-8"))

    @cached_property
    def weights(self) -> str:
        """The hash of the model's weights, computed once."""
        return content_hash(self.model.path() / "model.safetensors")

    def path(self) -> Path:
        """Return the folder; UserError if it is not a datastore encoded by this run's model."""
        content, setting = self.identity(), f"datastore.path={self.folder}"
        if content["section"] != "datastore":
            raise UserError(
                f"{setting} is a split encoded for scoring, not a datastore: name the encode-… folder of a datastore"
            )
        if content["model"] != self.weights:
            raise UserError(f"{setting} was encoded by another model: its keys mean nothing to this one")
        return self.folder

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document, as far as the datastore holds them."""
        begun: list[np.ndarray] = []
        document = -1
        for columns in Shards(self.folder).iter_columns("token", "document"):
            tokens, numbers = (column.numpy() for column in columns)
            for run in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers)) + 1):
                if begun and numbers[run[0]] != document:
                    yield np.concatenate(begun)
                    begun = []
                document = numbers[run[0]]
                begun.append(tokens[run])
        yield np.concatenate(begun)

    def build(self, folder: Path) -> None:
        raise AssertionError("a given datastore is never built")


def duplicates_in_store(corpus: Corpus, split: str, store: ExternalStore) -> Iterator[str]:
    """Yield a note if documents of a split are also in a datastore.

    A datastore with a budget of tokens holds the starts of documents: no more of any document is compared. One of the split
    itself hides each document from itself.
    """
    source = store.identity()
    comparable = split in corpus.statistics["splits"] and source["vocabulary_fingerprint"] == corpus.vocabulary.fingerprint
    if comparable and source["text"] != corpus.fingerprint(split):
        documents, longest = corpus.split(split), max(map(len, store.documents()))
        tokens = (documents.document(number) for number in range(len(documents.lengths)))
        if found := find_duplicates(tokens, store.documents(), longest):
            where = f"datastore.path={store.folder}"
            yield describe_duplicates(found, documents.lengths, split, where, corpus.names(split))


INDEX = Stage("index", lambda graph: graph.memories.artefacts("index"))
