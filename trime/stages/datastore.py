"""datastore: the search index over the encoded external corpus (TRIME section 5.2)."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.corpus import content_hash
from trime.errors import UserError
from trime.memory.retrieval.datastore import Datastore, Keys, KNNMemory, Shards
from trime.memory.retrieval.ray_cluster import open_ray_search
from trime.memory.retrieval.search import MIN_POINTS_PER_CELL, ExactSearch, Search, ShardedSearch, recall_of
from trime.memory.retrieval.sharded import IndexPart, build_parts, check_factory, split_into_parts
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.pipeline.manifest import check_manifest
from trime.pipeline.rows import memories_of
from trime.types import Float, Tensor

log = logging.getLogger(__name__)

AUTO = "auto"
EXACT_UP_TO = 2**17  # keys that index=auto searches exactly: about ten milliseconds per 100 queries
SAMPLE = 256  # stored keys used as queries to choose the number of cells that index=auto visits
GAIN = 0.01  # the gain of recall for which it visits twice as many cells


class Index(Artefact):
    """A FAISS index file, or keys sorted by cells; a description only where search is exact by brute force."""

    kind, depends_on = "datastore", ("index.factory", "index.metric")
    unhashed = ("index",)

    def __init__(self, config: DictConfig, store: Artefact, largest_k: int | None = None):
        """``largest_k``: the largest K of any search, for which index=auto chooses how much to visit; by default index.k."""
        super().__init__(config)
        self.store, self.largest_k = store, largest_k or int(self.config.index.k)

    def needs(self) -> list[Artefact]:
        return [self.store]

    def settings(self) -> Any:
        index = self.config.index
        chosen = {"recall": index.recall, "k": self.largest_k} if index.factory == AUTO else {}
        return super().settings() | chosen | ({"parts": index.parts} if index.parts > 1 else {})

    def build(self, folder: Path) -> None:
        meter, store, index = ResourceUsage(), self.store.path(), self.config.index
        entries, width = len(Keys(Shards(store))), self.information()["width"]
        factory = check_index(index, entries, width)
        parts = split_into_parts(store, index.parts, folder, factory, index.metric)
        if factory:
            with tqdm(total=entries, unit="key", unit_scale=True, desc=f"index {factory}", mininterval=1) as bar:
                build_parts(parts, folder, bar)
        size = sum(path.stat().st_size for path in (*folder.rglob("*"), *store.iterdir()) if is_permanent(path))
        content = {
            "entries": entries,
            "bytes": size,
            "index": factory or "exact",
            "metric": index.metric,
            "build_seconds": round(meter.seconds + self.information()["seconds"], 1),
        }
        if index.factory == AUTO:
            content |= self.choose_probe(parts)
        (folder / "datastore.json").write_text(json.dumps(content, indent=1))
        for file in folder.glob("learned.*"):
            file.unlink()

    def choose_probe(self, parts: list[IndexPart]) -> dict[str, Any]:
        """Return how many cells to visit so that stored keys reach ``index.recall`` as queries, and their recall.

        The number is doubled until recall suffices, or hardly grows because the codes of a product quantiser limit it.
        """
        factory, target, metric = parts[0].factory, self.config.index.recall, self.config.index.metric
        if not factory:
            return {"probe": 1, "expected_recall": 1.0}
        keys = Keys(Shards(self.store.path()))
        queries, k = sample_keys(keys, SAMPLE), min(self.largest_k, len(keys))
        _, exact = ExactSearch(keys.blocks, metric).nearest(queries, k)

        def recall(probe: int) -> float:
            return recall_of(exact, open_search(parts, probe).nearest(queries, k)[1])

        probe, expected = 1, recall(1)
        while expected < target and probe < cell_count(factory):
            doubled = recall(2 * probe)
            if doubled < expected + GAIN:
                break
            probe, expected = 2 * probe, doubled
        log.info(f"datastore: index=auto chose {factory}, probe {probe}: recall {expected:.2f} expected of {len(keys):,} keys")
        return {"probe": probe, "expected_recall": expected}

    def information(self) -> dict[str, Any]:
        """Return the description of the encoded corpus."""
        return self.store.read("encode.json")

    def statistics(self) -> dict[str, Any]:
        """Return the description of the index, with the number of cells a search visits (chosen at build, or configured)."""
        built = self.read("datastore.json")
        return built if built["index"] == "exact" else {"probe": self.config.index.probe} | built

    def search(self) -> Search:
        """Return the search over the index, in this process or on the workers of a Ray cluster."""
        index, built = self.config.index, self.statistics()
        factory = None if built["index"] == "exact" else built["index"]
        parts = split_into_parts(self.store.path(), index.parts, self.path(), factory, index.metric)
        probe = built.get("probe", index.probe)
        if index.engine == "local":
            return open_search(parts, probe, index.device)
        return open_ray_search(parts, probe, index.device, index.address, index.cores)

    def knn_memory(self, queries: dict[str, Any]) -> KNNMemory:
        """Return the memory of the K nearest entries for the queries of an encoded split, whose description is ``queries``.

        UserError if the datastore holds that very split, and documents cannot be told apart to hide their own entries.
        """
        store, index, stored = Datastore(self.store.path()), self.config.index, self.information()
        same = stored["text"] == queries["text"]
        if same and not (stored["bounded"] and queries["bounded"]):
            raise UserError(
                f"the datastore holds the {queries['split']} split that is scored, and with evaluate.bounded=false documents "
                "cannot be told apart: set evaluate.bounded=true, or another datastore.split"
            )
        return KNNMemory(store, self.search(), index.k, index.metric, index.rescore, hide_own=same)


def check_index(index: DictConfig, entries: int, width: int) -> str | None:
    """Return the factory string for this many keys, None for exact search; UserError if they cannot be indexed with it."""
    if index.parts > entries:
        raise UserError(f"index.parts={index.parts} is more than the {entries} entries: lower it, or raise datastore.tokens")
    factory = index.factory
    factory = choose_factory(entries, width, index.parts) if factory == AUTO else complete_factory(factory, entries, width)
    if factory:
        check_factory(factory, entries, width, index.metric)
    return factory


def choose_factory(entries: int, width: int, parts: int = 1) -> str | None:
    """Return the factory of index=auto: exact if that is fast, cells if a part's keys fit in half the memory, else PQ codes."""
    if entries <= EXACT_UP_TO:
        return None
    return complete_factory("Cells" if 2 * width * entries / parts <= machine_memory() / 2 else "IVF_PQ", entries, width)


def complete_factory(factory: str | None, entries: int, width: int) -> str | None:
    """Fill in the numbers that a factory string leaves out: about √n cells, half of the dimensions, at most 64 codes."""
    if factory is None:
        return None
    cells = max(1, min(2 ** round(math.log2(math.sqrt(entries))), entries // MIN_POINTS_PER_CELL))
    half = max(1, width // 2)
    pca = re.search(r"PCA\w*?(\d+)", factory)
    reduced = int(pca[1]) if pca else half if "PCA" in factory else width
    codes = next(n for n in (64, 32, 16, 8, 4, 2, 1) if reduced % n == 0 and (n <= reduced // 2 or n == 1))
    defaults = {"Cells": cells, "IVF": cells, "PCA": half, "PCAR": half, "PQ": codes, "OPQ": codes}
    return "_".join(f"{part}{defaults.get(part, '')}" for part in re.split("[_,]", factory))


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cell_count(factory: str) -> int:
    """Return the number of cells in a factory string."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)


def is_permanent(path: Path) -> bool:
    """Return whether a file remains in the finished index (``learned.*`` is deleted after the build)."""
    return path.is_file() and path.stem != "learned"


def open_search(parts: list[IndexPart], probe: int, device: str = "cpu") -> Search:
    """Return the search over all parts, in this process."""
    searches = [part.search(probe, device) for part in parts]
    return searches[0] if len(parts) == 1 else ShardedSearch(searches, [part.first for part in parts])


def sample_keys(keys: Keys, count: int) -> Float[Tensor, "n d"]:
    """Return ``count`` stored keys at even distances."""
    return keys.take(torch.arange(0, len(keys), max(1, len(keys) // count))[:count, None]).squeeze(1)


class ExternalStore(Artefact):
    """A datastore that another run encoded with the same model."""

    kind, unhashed = "encode", ("datastore.path",)

    def __init__(self, config: DictConfig, model: Artefact):
        super().__init__(config)
        self.model = model

    @property
    def folder(self) -> Path:
        """The folder that ``datastore.path=`` names."""
        return Path(self.config.datastore.path).expanduser()

    def settings(self) -> Any:
        remedy = "name an encode-… folder of a run in datastore.path="
        if not (self.folder / "encode.json").is_file():
            raise UserError(f"datastore.path={self.folder} is no datastore: {remedy}")
        check_manifest(self.folder, "encode-.*", remedy, self.config.artefacts.verify)
        return json.loads((self.folder / "encode.json").read_text())

    @cached_property
    def weights(self) -> str:
        """The hash of the model's weights, computed once."""
        return content_hash(self.model.path() / "model.safetensors")

    def path(self) -> Path:
        """Return the folder; UserError if it is not a datastore encoded by this run's model."""
        content, setting = self.settings(), f"datastore.path={self.folder}"
        if content["section"] != "datastore":
            raise UserError(
                f"{setting} is a split encoded for scoring, not a datastore: name the encode-… folder of a datastore"
            )
        if content["model"] != self.weights:
            raise UserError(f"{setting} was encoded by another model: its keys mean nothing to this one")
        return self.folder

    def build(self, folder: Path) -> None:
        raise AssertionError("a given datastore is never built")


def uses_external(config: DictConfig) -> bool:
    """Return whether a row uses the external memory."""
    return "external" in memories_of(config)
