"""Released checkpoints in fairseq's format, converted to this package's networks.

Language models (TRIME, kNN-LM, Baevski & Auli). Only tensors and plain values are unpickled; unknown architectures and
weights are refused.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from trime.common.types import Tensor
from trime.errors import UserError
from trime.models.network import Network, build_network

PAD = 1  # in every fairseq dictionary
POSITIONS = 4096  # at least: sinusoids are computed, so windows may be longer than in training
PLAIN_INPUT, SOFTMAX = "trime.layers.embeddings.PlainInput", "trime.layers.heads.Softmax"
# Arguments that change the forward pass, and the values of them that are supported: most must be off.
BOTH = ("decoder_learned_pos", "no_token_positional_embeddings", "no_scale_embedding")
LANGUAGE_MODEL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*BOTH, "character_embeddings"), (False, None)),
    "activation_fn": ("relu", None),
    "decoder_normalize_before": (True, None),
}
SUBLAYERS = {
    "attention": "self_attn",
    "cross": "encoder_attn",
    "attention_norm": "self_attn_layer_norm",
    "cross_norm": "encoder_attn_layer_norm",
    "ffn_norm": "final_layer_norm",
    "ffn.0": "fc1",
    "ffn.3": "fc2",
}


class FairseqCheckpoint(NamedTuple):
    """A checkpoint's arguments, its decoder's weights, and its record of the training."""

    args: dict[str, Any]
    weights: dict[str, Tensor]
    history: dict[str, Any]


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """Read a file; UserError where it is not such a checkpoint, or holds more than tensors and plain values."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        if match and isinstance(error, pickle.UnpicklingError):
            raise UserError(f"{path} holds {match[1]}, not only tensors and plain values: it is not opened") from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path} is truncated or no PyTorch checkpoint ({reason}): fetch it again") from None
    has_model = isinstance(content, dict) and isinstance(content.get("model"), dict)
    if not has_model or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(
            f"{path} is not a fairseq checkpoint with args and model: only the format of TRIME, kNN-LM and Baevski-Auli is read"
        )
    weights: dict[str, Tensor] = {}
    for name, value in content["model"].items():
        name = name.removeprefix("decoder.")
        if match := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):  # older files join query, key and value
            pieces = zip("qkv", value.chunk(3), strict=True)
            weights |= {f"{match[1]}{letter}_proj.{match[2]}": piece for letter, piece in pieces}
        else:
            weights[name] = value
    last = (content.get("optimizer_history") or [{}])[-1] or {}
    epoch = ((content.get("extra_state") or {}).get("train_iterator") or {}).get("epoch")
    history = {"updates": last.get("num_updates"), "epoch": epoch, "criterion": last.get("criterion_name")}
    return FairseqCheckpoint(dict(vars(content["args"])), weights, history)


def network_from_checkpoint(checkpoint: FairseqCheckpoint) -> tuple[Network, dict[str, Any]]:
    """Return a language model with the checkpoint's weights, and its conf/model; UserError where it is not supported."""
    return convert(checkpoint, language_model_config, language_model_sources)


def convert(
    checkpoint: FairseqCheckpoint,
    describe: Callable[[FairseqCheckpoint], dict[str, Any]],
    source_names: Callable[[str], list[str]],
) -> tuple[Network, dict[str, Any]]:
    """Return the network that ``describe`` configures, and that; ``source_names``: the file's weights in a parameter."""
    try:
        description, tables = describe(checkpoint), embedding_tables(checkpoint.weights)
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error}: it is truncated, or of an architecture that is not supported") from None
    network, weights = build_network(OmegaConf.create(description), sum(map(len, tables))), checkpoint.weights
    used: set[str] = set()
    for name, parameter in network.named_parameters():  # shared parameters come once, under the embedding's name
        sources = source_names(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            raise UserError(f"the checkpoint lacks {missing[0]}: it is truncated, or not of the architecture that it names")
        pieces = [weights[source] for source in sources]
        if any(piece.shape[1:] != parameter.shape[1:] for piece in pieces) or sum(map(len, pieces)) != len(parameter):
            shapes = " and ".join(str(tuple(piece.shape)) for piece in pieces)
            raise UserError(f"the checkpoint's {' and '.join(sources)} have the shape {shapes}, not {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(torch.cat(pieces))
        used |= set(sources)
    copies = {  # of tied weights, which are stored twice
        "output_projection.weight": "embed_tokens.weight",
        "adaptive_softmax.head.word_proj.weight": "embed_tokens.embeddings.0.0.weight",
    }
    for name in set(weights) - used:
        source = copies.get(name, "")
        if tail := re.fullmatch(r"adaptive_softmax\.tail\.(\d+)\.([02])\.weight", name):  # 0: projection, 2: words
            source = f"embed_tokens.embeddings.{int(tail[1]) + 1}.{1 if tail[2] == '0' else 0}.weight"
        is_unused_norm = name.startswith("layer_norm.") and not has_final_norm(weights)
        is_copy = source in weights and torch.equal(weights[source], weights[name])
        is_marker = name.endswith(("version", "_float_tensor"))
        if not (is_unused_norm or is_copy or is_marker):
            raise UserError(f"the checkpoint's {name} has no place in this architecture: it is not supported")
    return network.eval(), description


def check_supported(args: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise UserError where an argument of the checkpoint has a value that is not supported."""
    for name, values in supported.items():
        if args.get(name) not in values:
            raise UserError(f"the checkpoint's {name}={args[name]} is not supported, only {values[0]} is")


def has_final_norm(weights: dict[str, Tensor]) -> bool:
    """Return whether the decoder has a final norm: up to version 2 of the format it has none, even if the file holds one."""
    version = weights.get("version")
    return "layer_norm.weight" in weights and (version is None or float(version[0]) > 2)


def embedding_tables(weights: dict[str, Tensor]) -> list[Tensor]:
    """Return the decoder's embedding tables: a single one, or those of all bands in order."""
    names = [name for name in weights if re.fullmatch(r"embed_tokens\.embeddings\.\d+\.0\.weight", name)]
    names.sort(key=lambda name: int(name.split(".")[2]))
    return [weights[name] for name in names or ["embed_tokens.weight"]]


def language_model_config(checkpoint: FairseqCheckpoint) -> dict[str, Any]:
    """Return embedding, backbone and head in the form of conf/model; UserError where the model is not supported."""
    args, weights = checkpoint.args, checkpoint.weights
    check_supported(args, LANGUAGE_MODEL)
    if not str(args.get("arch", "")).startswith("transformer_lm"):
        raise UserError(f"the checkpoint's architecture {args.get('arch')} is not supported, only transformer_lm_* is")
    if args.get("adaptive_softmax_cutoff") is None:
        embedding = {"_target_": PLAIN_INPUT, "width": embedding_tables(weights)[0].shape[1], "pad": PAD}
        head: dict[str, Any] = {"_target_": SOFTMAX, "tied": "embed_out" not in weights}
    else:
        if not args.get("adaptive_input") or not args.get("tie_adaptive_weights"):
            raise UserError("the checkpoint's adaptive softmax is not tied to an adaptive input, which is not supported")
        embedding = {
            "_target_": "trime.layers.embeddings.AdaptiveInput",
            "width": args["decoder_embed_dim"],
            "cutoffs": [*accumulate(map(len, embedding_tables(weights)))][:-1],
            "factor": float(args.get("adaptive_input_factor") or args.get("adaptive_softmax_factor") or 4),
            "pad": PAD,
        }
        tied = bool(args.get("tie_adaptive_proj"))
        head = {"_target_": "trime.layers.heads.AdaptiveSoftmax", "tied_projections": tied, "dropped_in_band": False}
    backbone = {
        "_target_": "trime.models.backbones.transformer.Transformer",
        "layers": args["decoder_layers"],
        "heads": args["decoder_attention_heads"],
        "inner": args["decoder_ffn_embed_dim"],
        "positions": max(POSITIONS, int(args.get("tokens_per_sample") or 0)),
        "final_norm": has_final_norm(weights),
        "pad": PAD,
    }
    return {"embedding": embedding, "backbone": backbone, "head": head}


def language_model_sources(name: str) -> list[str]:
    """Return the names of the checkpoint's weights that are concatenated in a parameter of a language model."""
    owner, module, *rest = name.split(".")
    if owner == "head":
        names = {"classes": "adaptive_softmax.head.class_proj.weight", "weight": "embed_out"}
        return [names.get(module) or f"adaptive_softmax.tail.{rest[0]}.0.weight"]
    if module == "embedding":
        kind, number = rest
        prefix = {"tables": f"embeddings.{number}.0.", "projections": f"embeddings.{number}.1."}.get(kind, "")
        return [f"embed_tokens.{prefix}weight"]
    if module == "final_norm":
        return [f"layer_norm.{rest[0]}"]
    number, *sublayer, kind = rest
    if sublayer == ["attention", "qkv_proj"]:
        return [f"layers.{number}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
    if sublayer == ["attention", "out_proj"]:
        return [f"layers.{number}.self_attn.out_proj.{kind}"]
    return [f"layers.{number}.{SUBLAYERS['.'.join(sublayer)]}.{kind}"]
