"""datastore: the index over the encoded external corpus (TRIME section 5.2)."""

from __future__ import annotations

import json
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.corpus import content_hash
from trime.memory.datastore import Datastore, Nearest
from trime.memory.search import Exact, Faiss, Search, build_faiss
from trime.metrics import Meter
from trime.stages.artefact import Artefact
from trime.types import UserError


class Index(Artefact):
    """A FAISS index file, or nothing but a description where search is exact by brute force."""

    kind, stage = "datastore", "datastore"

    def __init__(self, config: DictConfig, store: Artefact):
        super().__init__(config)
        self.store = store

    def needs(self) -> list[Artefact]:
        return [self.store]

    def settings(self) -> Any:
        return {"factory": self.config.index.factory, "metric": self.config.index.metric}

    def build(self, folder: Path) -> None:
        meter, store, index = Meter(), Datastore(self.store.path()), self.config.index
        width = self.information()["width"]
        if index.factory:
            with tqdm(total=len(store), unit="key", unit_scale=True, desc=f"index {index.factory}", mininterval=1) as bar:
                build_faiss(store.blocks, len(store), width, index.factory, index.metric, folder / "index.faiss", bar)
        size = sum(path.stat().st_size for place in (folder, self.store.path()) for path in place.iterdir())
        content = {
            "entries": len(store),
            "bytes": size,
            "index": index.factory or "exact",
            "metric": index.metric,
            "build_seconds": round(meter.seconds + self.information()["seconds"], 1),
        }
        (folder / "datastore.json").write_text(json.dumps(content, indent=1))

    def information(self) -> dict[str, Any]:
        return json.loads((self.store.path() / "encode.json").read_text())

    def statistics(self) -> dict[str, Any]:
        return json.loads((self.path() / "datastore.json").read_text())

    def nearest(self, asked: dict[str, Any]) -> Nearest:
        """The memory of the K nearest entries, for queries of an encoded split (its description)."""
        store, index, own = Datastore(self.store.path()), self.config.index, self.information()
        search: Search = Exact(store.blocks, index.metric)
        if index.factory:
            search = Faiss(self.path() / "index.faiss", index.metric, index.probe)
        same = own["text"] == asked["text"]
        if same and not (own["bounded"] and asked["bounded"]):
            raise UserError(
                f"the datastore holds the {asked['split']} split that is scored, and with evaluate.bounded=false no document "
                "can be told from another: set evaluate.bounded=true, or another datastore.split"
            )
        return Nearest(store, search, index.k, index.metric, index.rescore, hide_own=same)


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
