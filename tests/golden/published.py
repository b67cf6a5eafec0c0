"""Reads the golden folder: cases, checkpoints in the released format, windows."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trime.models.embeddings import AdaptiveInput, PlainInput
from trime.models.heads import AdaptiveSoftmax, Softmax
from trime.models.network import Network
from trime.models.transformer import Transformer
from trime.types import Batch

ROOT = Path(os.environ.get("TRIME_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "trime"


def index(part: str) -> dict[str, Any]:
    """The cases of a part; empty where the folder is absent, so that its tests skip."""
    path = ROOT / part
    return json.loads(path.read_text()) if path.is_file() else {}


def parametrized(name: str, cases: list[str]) -> Any:
    """One test a case, or one skipped test that says what is missing."""
    missing = pytest.param("absent", marks=pytest.mark.skip(reason=f"no golden vectors at {ROOT}"))
    return pytest.mark.parametrize(name, cases or [missing])


def arrays(path: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / path) as file:
        return dict(file)


def copy(module: Any, weight: Any) -> None:
    """Loads one tensor, whatever the precision."""
    with torch.no_grad():
        module.copy_(torch.as_tensor(weight))


def adaptive_head(case: dict[str, Any], weights: dict[str, np.ndarray], published: bool = False) -> AdaptiveSoftmax:
    """The output layer of a loss case, in float64."""
    embedding = AdaptiveInput(case["V"], weights["head_emb"].shape[1], case["cutoff"][:-1], case["factor"])
    head = AdaptiveSoftmax(embedding, tied_projections=False, dropped_in_band=published).double()
    copy(head.tables[0], weights["head_emb"])
    if "head_class" in weights:
        copy(head.classes, weights["head_class"])
    for tail, projection in enumerate(head.projections):
        copy(head.tables[tail + 1], weights[f"tail{tail}_emb"])
        copy(projection, weights[f"tail{tail}_proj"])
    return head


def checkpoint(model: str, which: str) -> tuple[argparse.Namespace, dict[str, torch.Tensor]]:
    """Arguments and weights of a released-format checkpoint, without unpickling anything else."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(ROOT / "model" / model / f"{which}.pt", weights_only=True)
    return content["args"], {name.removeprefix("decoder."): value for name, value in content["model"].items()}


def network(model: str, which: str = "checkpoint_last") -> Network:
    """The network of a checkpoint."""
    args, weights = checkpoint(model, which)
    embedding, head = (adaptive if args.adaptive_softmax_cutoff else plain)(args, weights)
    backbone = Transformer(
        embedding,
        args.decoder_layers,
        args.decoder_attention_heads,
        args.decoder_ffn_embed_dim,
        4096,
        final_norm="layer_norm.weight" in weights,
    )
    for number, layer in enumerate(backbone.layers):
        load_layer(
            layer, {k.removeprefix(f"layers.{number}."): v for k, v in weights.items() if k.startswith(f"layers.{number}.")}
        )
    if "layer_norm.weight" in weights:
        copy(backbone.final_norm.weight, weights["layer_norm.weight"])
        copy(backbone.final_norm.bias, weights["layer_norm.bias"])
    return Network(backbone, head).eval()


def plain(args: argparse.Namespace, weights: dict[str, torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    table = weights["embed_tokens.weight"]
    embedding = PlainInput(*table.shape)
    head = Softmax(embedding, tied=False)
    copy(embedding.table.weight, table)
    copy(head.weight, weights["embed_out"])
    return embedding, head


def adaptive(args: argparse.Namespace, weights: dict[str, torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    tables = [
        weights[f"embed_tokens.embeddings.{i}.0.weight"] for i in range(9) if f"embed_tokens.embeddings.{i}.0.weight" in weights
    ]
    cutoffs = np.cumsum([len(table) for table in tables]).tolist()
    embedding = AdaptiveInput(cutoffs[-1], args.decoder_embed_dim, cutoffs[:-1], args.adaptive_softmax_factor)
    head = AdaptiveSoftmax(embedding, tied_projections=args.tie_adaptive_proj)
    for i, table in enumerate(tables):
        copy(embedding.tables[i], table)
        copy(embedding.projections[i], weights[f"embed_tokens.embeddings.{i}.1.weight"])
    if len(tables) > 1:
        copy(head.classes, weights["adaptive_softmax.head.class_proj.weight"])
    for i, projection in enumerate([] if args.tie_adaptive_proj else head.projections):
        copy(projection, weights[f"adaptive_softmax.tail.{i}.0.weight"])
    return embedding, head


def load_layer(layer: Any, weights: dict[str, torch.Tensor]) -> None:
    for kind in ("weight", "bias"):
        parts = [weights[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
        copy(getattr(layer.attention.inward, kind), torch.cat(parts))
        copy(getattr(layer.attention.outward, kind), weights[f"self_attn.out_proj.{kind}"])
        copy(getattr(layer.attention_norm, kind), weights[f"self_attn_layer_norm.{kind}"])
        copy(getattr(layer.feed_norm, kind), weights[f"final_layer_norm.{kind}"])
        copy(getattr(layer.feed[0], kind), weights[f"fc1.{kind}"])
        copy(getattr(layer.feed[3], kind), weights[f"fc2.{kind}"])


def window_batch(window: dict[str, Any], pad: int) -> Batch:
    """A window as fed to the published model, as a batch of one row; context targets are the next source tokens."""
    source = torch.tensor(window["src"])
    target = torch.tensor(window["target"])
    length = int((source != pad).sum())
    shifted = torch.cat([source[1:length], target[length - 1 : length]])
    tokens, targets = source[None, :length], shifted[None]
    one = torch.ones(1, dtype=torch.long)
    begin = one * int(window["start"])
    return Batch(
        tokens, targets, one * length, target[None, :length] != pad, one * 0, one * int(window["id"]), begin, begin == 0
    )
