"""datastore: the index over the encoded external corpus (TRIME section 5.2)."""

from __future__ import annotations

import json
import math
import os
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.corpus import content_hash
from trime.memory.cells import Cells, build_cells
from trime.memory.datastore import Datastore, Nearest
from trime.memory.search import Exact, Faiss, Search, build_faiss, found_of
from trime.metrics import Meter
from trime.stages.artefact import Artefact
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
        return {"factory": index.factory, "metric": index.metric, **chosen}

    def build(self, folder: Path) -> None:
        meter, store, index = Meter(), Datastore(self.store.path()), self.config.index
        width = self.information()["width"]
        factory = chosen_factory(len(store), width) if index.factory == AUTO else index.factory
        if factory:
            with tqdm(total=len(store), unit="key", unit_scale=True, desc=f"index {factory}", mininterval=1) as bar:
                if cells_of(factory):
                    build_cells(store.blocks, len(store), width, cells_of(factory), index.metric, folder, bar)
                else:
                    build_faiss(store.blocks, len(store), width, factory, index.metric, folder / "index.faiss", bar)
        size = sum(path.stat().st_size for place in (folder, self.store.path()) for path in place.iterdir())
        content = {
            "entries": len(store),
            "bytes": size,
            "index": factory or "exact",
            "metric": index.metric,
            "build_seconds": round(meter.seconds + self.information()["seconds"], 1),
        }
        if index.factory == AUTO:
            content |= self.chosen_probe(folder, store, factory)
        (folder / "datastore.json").write_text(json.dumps(content, indent=1))

    def chosen_probe(self, folder: Path, store: Datastore, factory: str | None) -> dict[str, Any]:
        """How many cells to visit so that stored keys find ``index.recall`` of one another, by doubling, and that share.

        Where twice as many hardly find more (codes of a product quantiser are what limits them), it is enough.
        """
        wanted, metric, k = self.config.index.recall, self.config.index.metric, min(self.config.index.k, len(store))
        if not factory:
            return {"probe": 1, "expected_recall": 1.0}
        queries = sample_of(store, SAMPLE)
        _, exact = Exact(store.blocks, metric).nearest(queries, k)

        def recall(probe: int) -> float:
            return found_of(exact, searching(folder, factory, metric, probe).nearest(queries, k)[1])

        probe, expected = 1, recall(1)
        while expected < wanted and probe < most_cells(factory):
            more = recall(2 * probe)
            if more < expected + GAIN:
                break
            probe, expected = 2 * probe, more
        print(f"datastore: index=auto chose {factory}, probe {probe}: recall {expected:.2f} expected of {len(store):,} keys")
        return {"probe": probe, "expected_recall": expected}

    def information(self) -> dict[str, Any]:
        return json.loads((self.store.path() / "encode.json").read_text())

    def statistics(self) -> dict[str, Any]:
        return json.loads((self.path() / "datastore.json").read_text())

    def nearest(self, asked: dict[str, Any]) -> Nearest:
        """The memory of the K nearest entries, for queries of an encoded split (its description)."""
        store, index, own = Datastore(self.store.path()), self.config.index, self.information()
        built = self.statistics()
        search: Search = Exact(store.blocks, index.metric)
        if built["index"] != "exact":
            search = searching(self.path(), built["index"], index.metric, built.get("probe", index.probe), index.device)
        same = own["text"] == asked["text"]
        if same and not (own["bounded"] and asked["bounded"]):
            raise UserError(
                f"the datastore holds the {asked['split']} split that is scored, and with evaluate.bounded=false no document "
                "can be told from another: set evaluate.bounded=true, or another datastore.split"
            )
        return Nearest(store, search, index.k, index.metric, index.rescore, hide_own=same)


def chosen_factory(entries: int, width: int) -> str | None:
    """index=auto: exact where that is fast, cells while keys fit in half of the memory, else codes of a product quantiser."""
    if entries <= EXACT_UP_TO:
        return None
    cells = 2 ** round(math.log2(math.sqrt(entries)))
    if 2 * width * entries <= memory() / 2:
        return f"Cells{cells}"
    return f"IVF{cells}_PQ{next(codes for codes in (64, 32, 16, 8, 4, 2, 1) if width % codes == 0)}"


def memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cells_of(factory: str) -> int:
    """How many cells ``Cells…`` names; 0: it is FAISS's."""
    named = re.fullmatch(r"Cells(\d+)", factory)
    return int(named[1]) if named else 0


def most_cells(factory: str) -> int:
    """How many cells a factory string names."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)


def searching(folder: Path, factory: str, metric: str, probe: int, device: str = "cpu") -> Search:
    """What answers from an index's folder."""
    if cells_of(factory):
        return Cells(folder, metric, probe)
    return Faiss(folder / "index.faiss", metric, probe, device)


def sample_of(store: Datastore, count: int) -> Float[Tensor, "n d"]:
    """Stored keys, evenly chosen."""
    return store.keys(torch.arange(0, len(store), max(1, len(store) // count))[:count, None]).squeeze(1)


class GivenStore(Artefact):
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
    rows = config.evaluate.rows
    return any("external" in chain(row.get("joint", []), *row.get("interpolate", [])) for row in rows)
