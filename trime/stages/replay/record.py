"""record: writes queries and keys of a model's memory layers over the test text under unlimited memory, a file per document.

If only one layer has a memory, its queries and keys do not depend on what the memory holds: any policy and size
can be replayed from them exactly, without the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trime.common.identity import Free, identity_of
from trime.common.io import write_json, write_tensors
from trime.common.progress import Progress
from trime.common.types import Tensor
from trime.data.segments import Segments, collate
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.stage import Stage
from trime.models.network import Reader
from trime.stages.encode import Encode
from trime.stages.model_io import ModelSettings
from trime.training.callbacks.staleness import memory_layers

NO_MEMORY = "stages=[record] needs a model with a built-in memory: experiment=memorizing"


@dataclass(frozen=True, eq=False, repr=False)
class Record(Artefact):
    """Query and key [tokens h d] of each memory layer, in ``00000.safetensors`` and so on, and ``record.json``."""

    kind, format = "record", 2
    summary_file = "record.json"

    encoded: Free[Encode]  # the same windows are read with an unlimited memory
    block: int  # tokens of a window
    lab: Free[Lab]

    def needs(self) -> list[Artefact]:
        return [self.encoded.corpus, self.encoded.model]

    def identity(self) -> Any:
        # The memory's size and policy are no part of what is recorded, and neither is the type of stored encodings.
        encoded = {key: value for key, value in self.encoded.identity().items() if key != "reading"}
        return super().identity() | encoded | {"portion": identity_of(replace(self.encoded.portion, dtype=""))}

    def build(self, folder: Path) -> None:
        corpus = self.encoded.corpus.corpus()
        text, windows = corpus.split(self.encoded.split), self.encoded.windows(corpus)
        if "top_k" not in self.encoded.settings.model["backbone"].get("memory", {}):
            raise UserError(NO_MEMORY)
        # What a memory holds changes later queries and keys unless it holds everything, as it does here.
        network, description = self.unlimited(windows).open(self.encoded.model.path())
        device, backbone = self.encoded.hardware.device, network.backbone
        network.to(device)
        layers = memory_layers(backbone)
        if not layers:
            raise UserError(NO_MEMORY)
        calls: dict[int, list[tuple[Tensor, Tensor]]] = {number: [] for number in layers}  # of the document being read
        for number, of_layer in calls.items():
            backbone.attentions[number].register_forward_hook(partial(record_call, of_layer))
        documents, reader = np.unique(windows.document), Reader(network)
        with Progress(total=windows.scored(), unit="tok", unit_scale=True, desc="record") as bar:
            for number, document in enumerate(documents):
                file = folder / f"{number:05d}.safetensors"
                rows = np.flatnonzero(windows.document == document).tolist()
                if not file.exists():
                    for row in rows:
                        batch = collate(text, windows, [row], corpus.vocabulary.special_ids).to(device)
                        with torch.no_grad():
                            reader.encode(batch)
                    columns = {}
                    for layer, of_layer in calls.items():
                        for name, parts in zip(("query", "key"), zip(*of_layer, strict=True), strict=True):
                            columns[f"{layer}.{name}"] = torch.cat(parts).contiguous()
                        of_layer.clear()
                    write_tensors(file, columns)
                bar.update(int(windows.length[rows].sum()))
        memory = description["model"]["backbone"]["memory"]
        # A replay searches exactly, over all heads together, and knows only windows of one length.
        same_search = (
            memory["search"] == "exact" and not memory["per_head"] and not getattr(self.encoded.windowing, "lines", False)
        )
        content = {
            "layers": layers,
            "documents": len(documents),
            "segment": self.block,
            "as_replayed": same_search and self.encoded.hardware.precision == "32-true",  # so that a replay equals a run
        }
        write_json(folder / "record.json", content)

    def unlimited(self, windows: Segments) -> ModelSettings:
        """Return the settings of the model with a first-in-first-out memory so large that no document fills it."""
        settings, longest = self.encoded.settings, int((windows.start + windows.length).max())
        step = math.lcm(16, int(settings.model["backbone"]["memory"]["top_k"]))
        size, fifo = -(-longest // step) * step, {"_target_": "trime.memory.slots.eviction.fifo.FIFO"}
        return replace(settings, model=settings.model | {"memory_size": size}, eviction=fifo)


def record_call(calls: list[tuple[Tensor, Tensor]], attention: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Add the queries and keys [tokens h d] of an attention layer's call to ``calls``: a forward hook."""
    query, key, _ = attention.project(inputs[0])
    (query, key), _ = attention.normalize_and_scale(query, key)
    calls.append((query[0].transpose(0, 1).cpu(), key[0].transpose(0, 1).cpu()))


RECORD = Stage("record", lambda graph: [graph.test, *graph.tune.build_order()] if graph.memories.replayable else [graph.record])
