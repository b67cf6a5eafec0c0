"""Checkpoints in fairseq's format: files of a full set, or written from the numbers in a compact set.

A compact set has the flat state dict of ``NAME.pt`` in ``NAME.safetensors``, each tensor once, and the rest in
``NAME.json``: the arguments, the history of the training, and which names share a tensor.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from tests.golden.published import ROOT, index
from trime.layers.heads import AdaptiveSoftmax
from trime.models.fairseq import network_from_checkpoint, read_checkpoint
from trime.models.network import Network


@cache
def checkpoint(model: str, which: str = "checkpoint_last") -> Path:
    """Return the ``.pt`` file of a model; one that is missing is written to a temporary folder."""
    path = ROOT / "model" / model / f"{which}.pt"
    if not path.is_file():
        path = Path(temporary().name) / model / f"{which}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(joined(ROOT / "model" / model / which), path)
    return path


@cache
def temporary() -> TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return TemporaryDirectory(prefix="trime-golden-")


def joined(stem: Path) -> dict[str, Any]:
    """Return what fairseq saved, from a compact set's ``STEM.safetensors`` and ``STEM.json``."""
    tensors, values = parted(stem)
    shared = {name: tensors[stored] for name, stored in values.pop("shared").items()}
    return values | {"args": argparse.Namespace(**values["args"]), "model": tensors | shared}


def parted(stem: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors, each once, and its plain values; the optimiser's state is left out."""
    if not stem.with_suffix(".pt").is_file():
        return load_file(stem.with_suffix(".safetensors")), json.loads(stem.with_suffix(".json").read_text())
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(stem.with_suffix(".pt"), map_location="cpu", weights_only=True)
    first: dict[tuple[int, torch.Size], str] = {}
    stored = {name: first.setdefault((part.data_ptr(), part.shape), name) for name, part in content["model"].items()}
    return {name: part.contiguous() for name, part in content["model"].items() if stored[name] == name}, {
        "args": vars(content["args"]),
        "optimizer_history": content["optimizer_history"],
        "extra_state": {"train_iterator": content["extra_state"]["train_iterator"]},
        "shared": {name: other for name, other in stored.items() if name != other},
    }


def models() -> list[str]:
    """Return the names of all models, in the order of the index."""
    return [name for name in index("model/state_dict_keys.json") if not name.endswith("_shared")]


def network(model: str, which: str = "checkpoint_last", published: bool = False) -> Network:
    """Return the network of a released-format checkpoint, through the importer."""
    net, _ = network_from_checkpoint(read_checkpoint(checkpoint(model, which)))
    if published and isinstance(net.head, AdaptiveSoftmax):
        net.head.dropped_in_band = True
    return net


@cache
def corpus_of(model: str) -> str:
    """Return the name of the corpus that a model was trained on, from its arguments."""
    return Path(read_checkpoint(checkpoint(model)).args["data"]).name
