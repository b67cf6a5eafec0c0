"""datastore: the index over the encoded external corpus (TRIME section 5.2)."""

from __future__ import annotations

import json
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
from trime.memory.retrieval.datastore import Datastore, Keys, KNNMemory, Shards
from trime.memory.retrieval.ray_cluster import open_ray_search
from trime.memory.retrieval.search import MIN_POINTS_PER_CELL, ExactSearch, Search, ShardedSearch, recall_of
from trime.memory.retrieval.sharded import IndexPart, build_parts, check_factory, split_into_parts
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.pipeline.rows import memories_of
from trime.types import Float, Tensor, UserError

AUTO = "auto"
EXACT_UP_TO = 2**17  # keys: some ten milliseconds for each 100 of them
SAMPLE = 256  # stored keys from which index=auto learns how many cells to visit
GAIN = 0.01  # of recall, for which it visits twice as many


class Index(Artefact):
    """A FAISS index file, keys sorted by cells, or nothing but a description where search is exact by brute force."""

    kind, stage = "datastore", "datastore"

    def __init__(self, config: DictConfig, store: Artefact):
        super().__init__(config)
        self.store = store

    def needs(self) -> list[Artefact]:
        return [self.store]

    def settings(self) -> Any:
        index = self.config.index
        chosen = {"recall": index.recall} if index.factory == AUTO else {}
        chosen |= {"parts": index.parts} if index.parts > 1 else {}
        return {"factory": index.factory, "metric": index.metric, **chosen}

    def build(self, folder: Path) -> None:
        meter, place, index = ResourceUsage(), self.store.path(), self.config.index
        entries, width = len(Keys(Shards(place))), self.information()["width"]
        factory = check_index(index, entries, width)
        parts = split_into_parts(place, index.parts, folder, factory, index.metric)
        if factory:
            with tqdm(total=entries, unit="key", unit_scale=True, desc=f"index {factory}", mininterval=1) as bar:
                build_parts(parts, folder, bar)
        size = sum(path.stat().st_size for path in (*folder.rglob("*"), *place.iterdir()) if counts(path))
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
        """How many cells to visit so that stored keys find ``index.recall`` of one another, by doubling, and that share.

        Where twice as many hardly find more (codes of a product quantiser are what limits them), it is enough.
        """
        factory, wanted, metric = parts[0].factory, self.config.index.recall, self.config.index.metric
        if not factory:
            return {"probe": 1, "expected_recall": 1.0}
        keys = Keys(Shards(self.store.path()))
        queries, k = sample_keys(keys, SAMPLE), min(self.config.index.k, len(keys))
        _, exact = ExactSearch(keys.blocks, metric).nearest(queries, k)

        def recall(probe: int) -> float:
            return recall_of(exact, open_search(parts, probe).nearest(queries, k)[1])

        probe, expected = 1, recall(1)
        while expected < wanted and probe < cell_count(factory):
            more = recall(2 * probe)
            if more < expected + GAIN:
                break
            probe, expected = 2 * probe, more
        print(f"datastore: index=auto chose {factory}, probe {probe}: recall {expected:.2f} expected of {len(keys):,} keys")
        return {"probe": probe, "expected_recall": expected}

    def information(self) -> dict[str, Any]:
        return self.store.read("encode.json")

    def statistics(self) -> dict[str, Any]:
        """What is known of the index, and how many cells a search visits: as chosen when it was built, or as configured."""
        built = self.read("datastore.json")
        return built if built["index"] == "exact" else {"probe": self.config.index.probe} | built

    def search(self) -> Search:
        """What answers from the index: here, or on the workers of a cluster."""
        index, built = self.config.index, self.statistics()
        factory = None if built["index"] == "exact" else built["index"]
        parts = split_into_parts(self.store.path(), index.parts, self.path(), factory, index.metric)
        probe = built.get("probe", index.probe)
        if index.engine == "local":
            return open_search(parts, probe, index.device)
        return open_ray_search(parts, probe, index.device, index.address, index.cores)

    def nearest(self, asked: dict[str, Any]) -> KNNMemory:
        """The memory of the K nearest entries, for queries of an encoded split (its description)."""
        store, index, own = Datastore(self.store.path()), self.config.index, self.information()
        same = own["text"] == asked["text"]
        if same and not (own["bounded"] and asked["bounded"]):
            raise UserError(
                f"the datastore holds the {asked['split']} split that is scored, and with evaluate.bounded=false no document "
                "can be told from another: set evaluate.bounded=true, or another datastore.split"
            )
        return KNNMemory(store, self.search(), index.k, index.metric, index.rescore, hide_own=same)


def check_index(index: DictConfig, entries: int, width: int) -> str | None:
    """The factory string for so many keys; UserError where they could not be indexed as the configuration says."""
    if index.parts > entries:
        raise UserError(f"index.parts={index.parts} of {entries} entries: lower it, or raise datastore.tokens")
    factory = index.factory
    factory = choose_factory(entries, width, index.parts) if factory == AUTO else complete_factory(factory, entries, width)
    if factory:
        check_factory(factory, entries, width, index.metric)
    return factory


def choose_factory(entries: int, width: int, parts: int = 1) -> str | None:
    """index=auto: exact where that is fast, cells while a part's keys fit in half the memory, else product codes."""
    if entries <= EXACT_UP_TO:
        return None
    return complete_factory("Cells" if 2 * width * entries / parts <= memory() / 2 else "IVF_PQ", entries, width)


def complete_factory(factory: str | None, entries: int, width: int) -> str | None:
    """A factory string with the numbers that it leaves out: about √n cells, half of the dimensions, at most 64 codes."""
    if factory is None:
        return None
    cells = max(1, min(2 ** round(math.log2(math.sqrt(entries))), entries // MIN_POINTS_PER_CELL))
    half = max(1, width // 2)
    given = re.search(r"PCA\w*?(\d+)", factory)
    kept = int(given[1]) if given else half if "PCA" in factory else width
    codes = next(codes for codes in (64, 32, 16, 8, 4, 2, 1) if kept % codes == 0 and (codes <= kept // 2 or codes == 1))
    missing = {"Cells": cells, "IVF": cells, "PCA": half, "PCAR": half, "PQ": codes, "OPQ": codes}
    return "_".join(f"{part}{missing.get(part, '')}" for part in re.split("[_,]", factory))


def memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cell_count(factory: str) -> int:
    """How many cells a factory string names."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)


def counts(path: Path) -> bool:
    """A file that stays."""
    return path.is_file() and path.stem != "learned"


def open_search(parts: list[IndexPart], probe: int, device: str = "cpu") -> Search:
    """What answers from all parts, in this process."""
    searches = [part.search(probe, device) for part in parts]
    return searches[0] if len(parts) == 1 else ShardedSearch(searches, [part.first for part in parts])


def sample_keys(keys: Keys, count: int) -> Float[Tensor, "n d"]:
    """Stored keys, evenly chosen."""
    return keys.take(torch.arange(0, len(keys), max(1, len(keys) // count))[:count, None]).squeeze(1)


class ExternalStore(Artefact):
    """A datastore that another run encoded; refused where the model or the vocabulary is another."""

    kind, stage = "encode", "encode"

    def __init__(self, config: DictConfig, model: Artefact):
        super().__init__(config)
        self.model = model

    @property
    def folder(self) -> Path:
        return Path(self.config.datastore.path).expanduser()

    def settings(self) -> Any:
        if not (self.folder / "encode.json").is_file():
            raise UserError(f"datastore.path={self.folder} is no datastore: name a folder encode-… of a run")
        return json.loads((self.folder / "encode.json").read_text())

    @cached_property
    def weights(self) -> str:
        """The hash of the model's weights, read once."""
        return content_hash(self.model.path() / "model.safetensors")

    def path(self) -> Path:
        """The folder; UserError where it is no datastore of this run's model."""
        content, named = self.settings(), f"datastore.path={self.folder}"
        if content["section"] != "datastore":
            raise UserError(f"{named} was encoded to be scored, not to be a datastore: name the encode-… of a datastore")
        if content["model"] != self.weights:
            raise UserError(f"{named} was encoded by another model: its keys mean nothing to this one")
        return super().path()

    def build(self, folder: Path) -> None:
        raise AssertionError("a given datastore is never built")


def uses_external(config: DictConfig) -> bool:
    """Some row names the external memory."""
    return "external" in memories_of(config)
