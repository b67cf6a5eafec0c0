"""Released checkpoints in fairseq's format (TRIME, kNN-LM, Baevski & Auli), converted to this package's networks.

Only tensors and plain values are unpickled; unknown architectures and weights are refused.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from trime.errors import UserError
from trime.models.network import Network, build_network
from trime.types import Tensor

PAD = 1  # in every fairseq dictionary
POSITIONS = 4096  # at least: sinusoids are computed, so windows may be longer than in training
SUPPORTED = {  # arguments of fairseq's language models that change the forward pass, and the values that are supported
    "decoder_learned_pos": (False, None),
    "no_token_positional_embeddings": (False, None),
    "no_scale_embedding": (False, None),
    "character_embeddings": (False, None),
    "activation_fn": ("relu", None),
    "decoder_normalize_before": (True, None),
}


class FairseqCheckpoint(NamedTuple):
    """A checkpoint's arguments, its decoder's weights, and what it records of its training."""

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
        raise UserError(f"{path} is truncated or no PyTorch checkpoint ({one_line(error)}): fetch it again") from None
    has_model = isinstance(content, dict) and isinstance(content.get("model"), dict)
    if not has_model or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(
            f"{path} is not a fairseq checkpoint with args and model: only the format of TRIME, kNN-LM and Baevski-Auli is read"
        )
    weights = {name.removeprefix("decoder."): value for name, value in content["model"].items()}
    return FairseqCheckpoint(dict(vars(content["args"])), split_projections(weights), training_history(content))


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def training_history(content: dict[str, Any]) -> dict[str, Any]:
    """Return the updates, epochs and criterion of the training, as far as they are recorded."""
    last = (content.get("optimizer_history") or [{}])[-1] or {}
    epoch = ((content.get("extra_state") or {}).get("train_iterator") or {}).get("epoch")
    return {"updates": last.get("num_updates"), "epoch": epoch, "criterion": last.get("criterion_name")}


def split_projections(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with query, key and value projections split, which older files join."""
    result: dict[str, Tensor] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name)
        if match:
            result |= {f"{match[1]}{part}_proj.{match[2]}": piece for part, piece in zip("qkv", value.chunk(3), strict=True)}
        else:
            result[name] = value
    return result


def check_supported(args: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise UserError where an argument of the checkpoint has a value that is not supported."""
    for name, values in supported.items():
        if args.get(name) not in values:
            raise UserError(f"the checkpoint's {name}={args[name]} is not supported, only {values[0]} is")


def model_config(checkpoint: FairseqCheckpoint) -> dict[str, Any]:
    """Return embedding, backbone and head in the form of conf/model; UserError where the model is not supported."""
    args = checkpoint.args
    check_supported(args, SUPPORTED)
    if not str(args.get("arch", "")).startswith("transformer_lm"):
        raise UserError(f"the checkpoint's architecture {args.get('arch')} is not supported, only transformer_lm_* is")
    adaptive = args.get("adaptive_softmax_cutoff") is not None
    embedding, head = adaptive_parts(checkpoint) if adaptive else plain_parts(checkpoint)
    backbone = {
        "_target_": "trime.models.backbones.transformer.Transformer",
        "layers": args["decoder_layers"],
        "heads": args["decoder_attention_heads"],
        "inner": args["decoder_ffn_embed_dim"],
        "positions": max(POSITIONS, int(args.get("tokens_per_sample") or 0)),
        "final_norm": has_final_norm(checkpoint.weights),
        "pad": PAD,
    }
    return {"embedding": embedding, "backbone": backbone, "head": head}


def has_final_norm(weights: dict[str, Tensor]) -> bool:
    """Return whether the decoder has a final norm: up to version 2 of the format it has none, even if the file holds one."""
    version = weights.get("version")
    return "layer_norm.weight" in weights and (version is None or float(version[0]) > 2)


def plain_parts(checkpoint: FairseqCheckpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of a plain embedding and softmax."""
    width = checkpoint.weights["embed_tokens.weight"].shape[1]
    tied = "embed_out" not in checkpoint.weights
    embedding = {"_target_": "trime.models.layers.embeddings.PlainInput", "width": width, "pad": PAD}
    return embedding, {"_target_": "trime.models.layers.heads.Softmax", "tied": tied}


def adaptive_parts(checkpoint: FairseqCheckpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of an adaptive embedding and softmax; UserError where they are not tied."""
    args, weights = checkpoint.args, checkpoint.weights
    if not args.get("adaptive_input") or not args.get("tie_adaptive_weights"):
        raise UserError("the checkpoint's adaptive softmax is not tied to an adaptive input, which is not supported")
    sizes = [len(table) for table in embedding_tables(weights)]
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    embedding = {
        "_target_": "trime.models.layers.embeddings.AdaptiveInput",
        "width": args["decoder_embed_dim"],
        "cutoffs": edges[:-1],
        "factor": float(args.get("adaptive_input_factor") or args.get("adaptive_softmax_factor") or 4),
        "pad": PAD,
    }
    head = {"_target_": "trime.models.layers.heads.AdaptiveSoftmax", "tied_projections": bool(args.get("tie_adaptive_proj"))}
    return embedding, head | {"dropped_in_band": False}


def embedding_tables(weights: dict[str, Tensor]) -> list[Tensor]:
    """Return the embedding tables of all bands, in order."""
    names = [name for name in weights if re.fullmatch(r"embed_tokens\.embeddings\.\d+\.0\.weight", name)]
    return [weights[name] for name in sorted(names, key=lambda name: int(name.split(".")[2]))]


def network_from_checkpoint(checkpoint: FairseqCheckpoint) -> tuple[Network, dict[str, Any]]:
    """Return the network with the checkpoint's weights, and its configuration; UserError where a weight has no counterpart."""
    try:
        description = model_config(checkpoint)
        tables = embedding_tables(checkpoint.weights) or [checkpoint.weights["embed_tokens.weight"]]
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error}: it is truncated, or of an architecture that is not supported") from None
    network = build_network(OmegaConf.create(description), sum(map(len, tables)))
    return load_weights(network, checkpoint.weights, source_names), description


def load_weights(network: Network, weights: dict[str, Tensor], source_names: Callable[[str], list[str]]) -> Network:
    """Copy a checkpoint's weights into a network; ``source_names`` lists those that are concatenated in a parameter.

    UserError where a parameter has no weight in the checkpoint, or a weight no parameter.
    """
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
    check_unused(weights, used)
    return network.eval()


def source_names(name: str) -> list[str]:
    """Return the names of the checkpoint's weights that are concatenated in a parameter of the network."""
    part, module, *rest = name.split(".")
    if part == "head":
        names = {"classes": "adaptive_softmax.head.class_proj.weight", "weight": "embed_out"}
        return [names.get(module) or f"adaptive_softmax.tail.{rest[0]}.0.weight"]
    if module == "embedding":
        kind, number = rest
        prefix = {"tables": f"embeddings.{number}.0.", "projections": f"embeddings.{number}.1."}.get(kind, "")
        return [f"embed_tokens.{prefix}weight"]
    if module == "final_norm":
        return [f"layer_norm.{rest[0]}"]
    return [f"layers.{rest[0]}.{source}" for source in layer_sources(".".join(rest[1:]))]


def layer_sources(name: str) -> list[str]:
    """Return the names of a layer's weights that are concatenated in a parameter; all without the name of the layer."""
    module, _, kind = name.rpartition(".")
    if module == "attention.qkv_proj":
        return [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
    names = {
        "attention.out_proj": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
        "ffn.0": "fc1",
        "ffn.3": "fc2",
    }
    return [f"{names[module]}.{kind}"]


def check_unused(weights: dict[str, Tensor], used: set[str]) -> None:
    """Raise UserError where an unused weight is neither a marker nor a copy of a used one (tied weights are stored twice)."""
    for name in set(weights) - used:
        is_unused_norm = name.startswith("layer_norm.") and not has_final_norm(weights)
        is_marker = is_unused_norm or name.endswith(("version", "_float_tensor"))
        source = weights.get(tied_source(name))
        if not is_marker and (source is None or not torch.equal(source, weights[name])):
            raise UserError(f"the checkpoint's {name} has no place in this architecture: it is not supported")


def tied_source(name: str) -> str:
    """Return the name in the embedding of a word table or projection of a tied softmax; empty for other weights."""
    if name == "output_projection.weight":
        return "embed_tokens.weight"
    tail = re.fullmatch(r"adaptive_softmax\.tail\.(\d+)\.([02])\.weight", name)
    if tail:
        return f"embed_tokens.embeddings.{int(tail[1]) + 1}.{1 if tail[2] == '0' else 0}.weight"
    return "embed_tokens.embeddings.0.0.weight" if name == "adaptive_softmax.head.word_proj.weight" else ""
