"""Wrong calls of the library, each in a line; printed as a JSON dictionary of what each call said or raised.

A process of its own runs them, because the shape checks of the tests would refuse most of them before the library does.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trime
from trime.common.types import LogMass
from trime.errors import UserError

FOLDER, SHARD = Path(sys.argv[1]), "00000.safetensors"
NAN, INFINITE = float("nan"), float("inf")
draw = torch.Generator().manual_seed(0)
g, logits, targets = torch.randn(6, 4, generator=draw), torch.randn(6, 9, generator=draw), torch.arange(6)
rows, row_logits, row_targets = g.view(2, 3, 4), logits.view(2, 3, 9), targets.view(2, 3)
store = trime.Datastore.from_tensors(FOLDER / "store", g, targets)
window = trime.window_of(g, logits, targets)
mass = LogMass(torch.zeros(3), torch.zeros(3))
local, long = trime.LocalMemory(), trime.LongMemory([8], trime.FIFO())


def new_store(keys: Any = g, tokens: Any = targets, **settings: Any) -> Any:
    """Store keys in a folder of their own."""
    return trime.Datastore.from_tensors(FOLDER / f"store{len([*FOLDER.iterdir()])}", keys, tokens, **settings)


def copied(change: Callable[[Path], object]) -> Any:
    """Open a copy of a store that was not copied well."""
    folder = FOLDER / f"copy{len([*FOLDER.iterdir()])}"
    shutil.copytree(FOLDER / "store", folder)
    change(folder)
    return trime.Datastore.open(folder)


def loss(g: Any = rows, logits: Any = row_logits, targets: Any = row_targets, **settings: Any) -> Any:
    """Return the loss of rows of which some are wrong."""
    return trime.trime_loss(g, logits, targets, **settings)


def window_with(g: Any = g, logits: Any = logits, targets: Any = targets, **settings: Any) -> Any:
    """Return a window of which a part is wrong."""
    return trime.window_of(g, logits, targets, **settings)


def bm25() -> Any:
    """Return an index of two segments."""
    index = trime.BM25Neighbours()
    index.fit([targets.numpy(), targets.numpy()])
    return index


CALLS: dict[str, Callable[[], Any]] = {
    "k of 0": lambda: trime.KNNMemory(store, k=0),
    "k of 2.5": lambda: trime.KNNMemory(store, k=2.5),
    "k above the entries": lambda: trime.KNNMemory(store, k=7),
    "a folder as a store": lambda: trime.KNNMemory("folder", k=1),
    "a query of another width": lambda: trime.KNNMemory(store, k=1).entries(window_with(g=g[:, :3]).query),
    "a query of NaN": lambda: trime.KNNMemory(store, k=1).entries(window.query._replace(g=g * NAN)),
    "a query too large for products": lambda: trime.KNNMemory(store, k=1).entries(window.query._replace(g=g.abs() * 3e38)),
    "float tokens": lambda: new_store(tokens=targets.float()),
    "three-dimensional keys": lambda: new_store(keys=rows, tokens=targets[:2]),
    "keys of whole numbers": lambda: new_store(keys=g.long()),
    "float64": lambda: new_store(dtype="float64"),
    "keys too large for float16": lambda: new_store(keys=g * 1e6),
    "keys too large for 8 bits": lambda: new_store(keys=g * 1e6, dtype="int8"),
    "keys too large for products": lambda: new_store(keys=g.double() * 1e200, dtype="float32"),
    "keys too small for float16": lambda: new_store(keys=g * 1e-8),
    "keys too small for 8 bits": lambda: new_store(keys=g * 1e-8, dtype="int8"),
    "sparse keys": lambda: new_store(keys=g.to_sparse()),
    "a folder below a file": lambda: trime.Datastore.from_tensors(Path(__file__) / "store", g, targets),
    "a shard under another name": lambda: copied(lambda folder: (folder / SHARD).rename(folder / "00001.safetensors")),
    "a shard twice": lambda: copied(lambda folder: shutil.copy(folder / SHARD, folder / "00000 (1).safetensors")),
    "a store in part": lambda: copied(lambda folder: (folder / "encode.json").write_text('{"tokens": 99}')),
    "a store whose summary is cut": lambda: copied(lambda folder: (folder / "encode.json").write_text('{"tok')),
    "a file as a folder": lambda: trime.Datastore.from_tensors(__file__, g, targets),
    "a folder without a store": lambda: trime.Datastore.open(FOLDER / "none"),
    "a memory of a store": lambda: trime.ExternalMemory(store),
    "sizes that are a number": lambda: trime.LongMemory(16, trime.FIFO()),
    "falling sizes": lambda: trime.LongMemory([8, 4], trime.FIFO()),
    "a policy's class": lambda: trime.LongMemory([8], trime.FIFO),
    "a window in place of a transform": lambda: trime.SnapKV(32),
    "an even kernel": lambda: trime.SnapKV(kernel=4),
    "a key of blocks by its name": lambda: trime.Recall(8, key="mean"),  # type: ignore[arg-type]
    "a pyramid without layers": lambda: trime.pyramid(12, 0),
    "a pyramid of nothing": lambda: trime.pyramid(0, 2),
    "a share of recent entries above 1": lambda: trime.H2O(recent=1.5),
    "limits in the wrong order": lambda: trime.Clipped(2, 1),
    "segments of a document without start": lambda: loss(visibility=trime.Long(), document=torch.zeros(2, dtype=torch.long)),
    "a share above 1": lambda: trime.interpolate(torch.zeros(3), mass, share=1.5),
    "log-probabilities of another shape": lambda: trime.interpolate(torch.zeros(4), mass, share=0.5),
    "a mass that is NaN": lambda: trime.joint_log_prob(mass, [LogMass(torch.full((3,), NAN), torch.zeros(3))]),
    "reduction=avg": lambda: loss(reduction="avg"),
    "a temperature of -1": lambda: loss(temperature=-1),
    "a visibility's class": lambda: loss(visibility=trime.Local),
    "targets of another shape": lambda: loss(targets=row_targets[:, :2]),
    "targets outside": lambda: loss(targets=row_targets + 5),
    "g that is NaN": lambda: loss(g=rows * NAN),
    "nothing but ignored targets": lambda: loss(targets=torch.full((2, 3), -100)),
    "window: targets outside": lambda: window_with(targets=targets + 5),
    "window: fewer targets": lambda: window_with(targets=targets[1:]),
    "window: more logits than targets": lambda: window_with(g=g[1:], targets=targets[1:]),
    "window: g of NaN": lambda: window_with(g=g * NAN),
    "window: a document by its name": lambda: window_with(document="a.txt"),
    "no temperatures": lambda: trime.Adaptive([]),
    "a negative temperature": lambda: trime.Calibrated([-1.0]),
    "no memories": lambda: trime.MemoryMixture({}),
    "a memory's class": lambda: trime.MemoryMixture({"local": trime.LocalMemory}),
    "a memory called vocabulary": lambda: trime.MemoryMixture({"vocabulary": local}),
    "two folds": lambda: trime.MemoryMixture({"local": local}, folds=2),
    "an unfitted mixture": lambda: trime.MemoryMixture({"local": local}).score([window]),
    "no windows": lambda: trime.MemoryMixture({"local": local}).fit([]),
    "windows of two widths": lambda: trime.MemoryMixture({"local": local}).fit([window, window_with(g=g[:, :2])]),
    "windows that go back": lambda: trime.MemoryMixture({"long": long}).fit([window, window]),
    "BM25 of nothing": lambda: trime.BM25Neighbours().fit([]),
    "BM25 of tensors": lambda: trime.BM25Neighbours().fit([targets]),
    "BM25 of a segment that is none": lambda: bm25().nearest([2], 1),
    "a cache's policy by its name": lambda: trime.EvictingCache(None, 40, "snapkv"),  # type: ignore[arg-type]
    "a cache's policy as a class": lambda: trime.EvictingCache(None, 40, trime.Sink),  # type: ignore[arg-type]
    "loading nothing": lambda: trime.load(FOLDER / "none"),
}


def outcome(call: Callable[[], Any]) -> str:
    """Return the message of a UserError, or what else a call did."""
    try:
        return f"no error, but {call()}"
    except UserError as error:
        return f"UserError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({name: outcome(call) for name, call in CALLS.items()}))
