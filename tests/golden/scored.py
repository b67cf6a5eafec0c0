"""Cases of scored evaluation: their flags as our rows, their windows and their datastores (eval/index.json)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tests.golden.checkpoints import network
from tests.golden.published import PAD, ROOT, arrays, index
from trime.common.types import Batch
from trime.kv.eviction.fifo import FIFO
from trime.models.network import Reader
from trime.scoring.mixture_spec import Interpolation, MixtureSpec
from trime.scoring.scorer import Scorer
from trime.token_memory.search.datastore import Datastore, KNNMemory
from trime.token_memory.search.search import ExactSearch
from trime.token_memory.test.base import Memory, Window
from trime.token_memory.test.external import ExternalMemory
from trime.token_memory.test.local import LocalMemory
from trime.token_memory.test.long import LongMemory

ENTRIES = index("eval/index.json")
CASES = {name: case for name, case in ENTRIES.items() if "windows" in case}
STORES = {name.removeprefix("dstore_"): store for name, store in ENTRIES.items() if name.startswith("dstore_")}


def flag(case: dict, name: str, default: float) -> float:
    """Return the value of a command-line flag of the published program."""
    flags = case["flags"]
    return float(flags[flags.index(name) + 1]) if name in flags else default


def row_of(case: dict) -> tuple[MixtureSpec, bool]:
    """Return the row of a case, and whether its interpolation divides by the square root of the width."""
    flags, tau = case["flags"], flag(case, "--softmax-temp", 1.0)
    names = (("local", "--use-local"), ("long", "--use-long"), ("external", "--use-external"))
    used = tuple(name for name, option in names if option in flags)
    sizes = (int(flag(case, "--mem-size", 0)),)
    if "--knnlm" in flags:
        return MixtureSpec((), (Interpolation(("external",), (tau,), (flag(case, "--lmbda", 0),)),), sizes=sizes), False
    mode = flags[flags.index("--mode") + 1]
    if mode == "li":
        return MixtureSpec((), (Interpolation(used, (tau,), (case["extra"]["cache_lmbda"],)),), sizes=sizes), True
    interpolation = Interpolation(("external",), (flag(case, "--interp-temp", 1),), (flag(case, "--lmbda", 0),))
    return MixtureSpec(used, (interpolation,) if "--use-interp" in flags else (), (tau,), sizes), False


class CaseSettings(NamedTuple):
    """The settings of a case: its row, whether its interpolation is scaled, and whether it has the published quirk."""

    row: MixtureSpec
    scaled: bool
    published: bool


def case_settings(case: dict) -> CaseSettings:
    """Return the settings of a case."""
    return CaseSettings(*row_of(case), case["flags"][:2] == ["--mode", "gn"])


def windows_of(name: str) -> list[Batch]:
    """Return a set of windows as fed to the published model, each a batch of one row, with their places in the stream."""
    windows = index("eval/windows.json")[name]
    counts = {window["id"]: sum(token != PAD for token in window["target"]) for window in windows}
    ids = sorted(counts)
    firsts = dict(zip(ids, [0, *np.cumsum([counts[i] for i in ids])[:-1].tolist()], strict=True))
    return [window_batch(window, firsts[window["id"]]) for window in windows]


def window_batch(window: dict[str, Any], first: int) -> Batch:
    """Return one window; ``first`` is where its scored tokens begin in the stream. Context targets are the next tokens."""
    source, target = torch.tensor(window["src"]), torch.tensor(window["target"])
    length = int((source != PAD).sum())
    shifted = torch.cat([source[1:length], target[length - 1 : length]])
    one, scored = torch.ones(1, dtype=torch.long), target[None, :length] != PAD
    begin = one * (first - int((~scored).sum()))
    return Batch(
        source[None, :length], shifted[None], one * length, scored, one * 0, one * int(window["id"]), begin, begin == 0
    )


def datastore_arrays(name: str) -> dict[str, np.ndarray]:
    """Return a published datastore; one in half precision is its model's datastore, rounded."""
    file = f"eval/dstore_{name}.npz"
    return arrays(file if (ROOT / file).is_file() else f"eval/dstore_{STORES[name]['model']}.npz")


def datastore(folder: Path, name: str) -> Datastore:
    """Return a published datastore in shards of our own."""
    store, precision = datastore_arrays(name), torch.float16 if STORES[name]["fp16"] else torch.float32
    keys, token = torch.as_tensor(store["keys"]).to(precision), torch.as_tensor(store["vals"]).flatten().long()
    for number, part in enumerate(torch.arange(len(token)).split(1500)):
        columns = {"g": keys[part], "token": token[part], "document": torch.full_like(part, -1)}
        save_file(columns, folder / f"{number:05d}.safetensors")
    return Datastore(folder)


def encoded(case: dict) -> Iterator[Window]:
    """Return the windows of a case, encoded."""
    model = network(case["model"], published=case_settings(case).published)
    for batch in windows_of(case["windows"]):
        with torch.no_grad():
            contexts, vocabulary = Reader(model).contexts_and_mass(batch)
        yield Window(contexts, int((~batch.scored).sum()), vocabulary)


def scorer(case: dict, folder: Path, rescore: bool = False) -> Scorer:
    """Return the scorer of a case; its datastore, if it has one, is written to ``folder``."""
    row, scaled, _ = case_settings(case)
    memories: dict[str, Memory] = {"local": LocalMemory()}
    if "long" in row.memories:
        memories["long"] = LongMemory(list(row.sizes), FIFO(), across_documents=True, include_window=True)
    if "external" in row.memories:
        store, metric = datastore(folder, case["datastore"]), case["faiss"]
        nearest = KNNMemory(store, ExactSearch(store.keys.blocks, metric, 700), case["k"], metric, rescore)
        memories["external"] = ExternalMemory(nearest)
    return Scorer([row], memories, scaled, reset_on_gap=True)
