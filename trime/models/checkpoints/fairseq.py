"""Released checkpoints in fairseq's format (TRIME, kNN-LM, Baevski & Auli) as networks of our own.

Nothing but tensors and plain values is unpickled; an architecture or a weight that is not known is refused.
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

from trime.models.network import Network, build_network
from trime.types import Tensor, UserError

PAD = 1  # in every fairseq dictionary
POSITIONS = 4096  # at least: sinusoids are computed, so that windows may be longer than in training
REFUSED = {  # settings of fairseq's language models that change the forward pass, and the values that are understood
    "decoder_learned_pos": (False, None),
    "no_token_positional_embeddings": (False, None),
    "no_scale_embedding": (False, None),
    "character_embeddings": (False, None),
    "activation_fn": ("relu", None),
    "decoder_normalize_before": (True, None),
}


class Released(NamedTuple):
    """A checkpoint's arguments, its decoder's weights, and what else it tells of its training."""

    args: dict[str, Any]
    weights: dict[str, Tensor]
    history: dict[str, Any]


def read_checkpoint(path: Path) -> Released:
    """Reads a file; UserError where it is no such checkpoint or holds more than tensors and plain values."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named and isinstance(error, pickle.UnpicklingError):
            raise UserError(f"{path} holds {named[1]}, not tensors and plain values alone: it is not opened") from None
        raise UserError(f"{path} is truncated or no PyTorch checkpoint ({one_line(error)}): fetch it again") from None
    plain_form = isinstance(content, dict) and isinstance(content.get("model"), dict)
    if not plain_form or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(
            f"{path} is no fairseq checkpoint with args and model: only TRIME's, kNN-LM's and Baevski-Auli's form is read"
        )
    weights = {name.removeprefix("decoder."): value for name, value in content["model"].items()}
    return Released(dict(vars(content["args"])), upgraded(weights), history_of(content))


def one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def history_of(content: dict[str, Any]) -> dict[str, Any]:
    """Updates and epochs of the training, as far as they are told."""
    last = (content.get("optimizer_history") or [{}])[-1] or {}
    epoch = ((content.get("extra_state") or {}).get("train_iterator") or {}).get("epoch")
    return {"updates": last.get("num_updates"), "epoch": epoch, "criterion": last.get("criterion_name")}


def upgraded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Older files join query, key and value: all are split alike here."""
    result: dict[str, Tensor] = {}
    for name, value in weights.items():
        joined = re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name)
        if joined:
            result |= {f"{joined[1]}{part}_proj.{joined[2]}": piece for part, piece in zip("qkv", value.chunk(3), strict=True)}
        else:
            result[name] = value
    return result


def check_supported(args: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise UserError where an argument of the checkpoint has another value than those that are supported."""
    for name, values in supported.items():
        if args.get(name) not in values:
            raise UserError(f"the checkpoint's {name}={args[name]} is not supported: {values[0]} is")


def description_of(released: Released) -> dict[str, Any]:
    """The embedding, backbone and head of conf/model that hold the weights; UserError where none do."""
    args = released.args
    check_supported(args, REFUSED)
    if not str(args.get("arch", "")).startswith("transformer_lm"):
        raise UserError(f"the checkpoint's architecture {args.get('arch')} is not supported: transformer_lm_* is")
    adaptive = args.get("adaptive_softmax_cutoff") is not None
    embedding, head = adaptive_parts(released) if adaptive else plain_parts(released)
    backbone = {
        "_target_": "trime.models.backbones.transformer.Transformer",
        "layers": args["decoder_layers"],
        "heads": args["decoder_attention_heads"],
        "inner": args["decoder_ffn_embed_dim"],
        "positions": max(POSITIONS, int(args.get("tokens_per_sample") or 0)),
        "final_norm": has_final_norm(released.weights),
        "pad": PAD,
    }
    return {"embedding": embedding, "backbone": backbone, "head": head}


def has_final_norm(weights: dict[str, Tensor]) -> bool:
    """Versions up to 2 of the format had none, whatever the file holds."""
    version = weights.get("version")
    return "layer_norm.weight" in weights and (version is None or float(version[0]) > 2)


def plain_parts(released: Released) -> tuple[dict[str, Any], dict[str, Any]]:
    width = released.weights["embed_tokens.weight"].shape[1]
    tied = "embed_out" not in released.weights
    embedding = {"_target_": "trime.models.layers.embeddings.PlainInput", "width": width, "pad": PAD}
    return embedding, {"_target_": "trime.models.layers.heads.Softmax", "tied": tied}


def adaptive_parts(released: Released) -> tuple[dict[str, Any], dict[str, Any]]:
    args, weights = released.args, released.weights
    if not args.get("adaptive_input") or not args.get("tie_adaptive_weights"):
        raise UserError("the checkpoint's adaptive softmax is not tied to an adaptive input: only that form is supported")
    sizes = [len(table) for table in tables_of(weights)]
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


def tables_of(weights: dict[str, Tensor]) -> list[Tensor]:
    """The embedding tables of all bands, in order."""
    names = [name for name in weights if re.fullmatch(r"embed_tokens\.embeddings\.\d+\.0\.weight", name)]
    return [weights[name] for name in sorted(names, key=lambda name: int(name.split(".")[2]))]


def network_of(released: Released) -> tuple[Network, dict[str, Any]]:
    """The network with the checkpoint's weights, and its description; UserError where a weight has no place."""
    try:
        description = description_of(released)
        tables = tables_of(released.weights) or [released.weights["embed_tokens.weight"]]
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error}: it is truncated, or of an architecture that is not supported") from None
    network = build_network(OmegaConf.create(description), sum(map(len, tables)))
    return fill(network, released.weights, sources_of), description


def fill(network: Network, weights: dict[str, Tensor], sources_of: Callable[[str], list[str]]) -> Network:
    """Copy a checkpoint's weights into a network; ``sources_of`` names those that are joined in one of its parameters.

    UserError where a parameter has none, or a weight no parameter.
    """
    used: set[str] = set()
    for name, parameter in network.named_parameters():  # shared ones once, under the embedding's name
        sources = sources_of(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            raise UserError(f"the checkpoint lacks {missing[0]}: it is truncated, or of another architecture than it says")
        pieces = [weights[source] for source in sources]
        if any(piece.shape[1:] != parameter.shape[1:] for piece in pieces) or sum(map(len, pieces)) != len(parameter):
            shapes = " and ".join(str(tuple(piece.shape)) for piece in pieces)
            raise UserError(f"the checkpoint's {' and '.join(sources)} have the shape {shapes}, not {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(torch.cat(pieces))
        used |= set(sources)
    check_left(weights, used)
    return network.eval()


def sources_of(name: str) -> list[str]:
    """The checkpoint's weights that are joined in one of ours."""
    part, module, *rest = name.split(".")
    if part == "head":
        own = {"classes": "adaptive_softmax.head.class_proj.weight", "weight": "embed_out"}
        return [own.get(module) or f"adaptive_softmax.tail.{rest[0]}.0.weight"]
    if module == "embedding":
        kind, number = rest
        place = {"tables": f"embeddings.{number}.0.", "projections": f"embeddings.{number}.1."}.get(kind, "")
        return [f"embed_tokens.{place}weight"]
    if module == "final_norm":
        return [f"layer_norm.{rest[0]}"]
    return [f"layers.{rest[0]}.{source}" for source in layer_sources(".".join(rest[1:]))]


def layer_sources(name: str) -> list[str]:
    module, _, kind = name.rpartition(".")
    if module == "attention.inward":
        return [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
    named = {
        "attention.outward": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "feed_norm": "final_layer_norm",
        "feed.0": "fc1",
        "feed.3": "fc2",
    }
    return [f"{named[module]}.{kind}"]


def check_left(weights: dict[str, Tensor], used: set[str]) -> None:
    """What is left must be a marker, or a copy of what was used (tied weights are stored twice)."""
    for name in set(weights) - used:
        marker = name.endswith(("version", "_float_tensor")) or (name.startswith("layer_norm.") and not has_final_norm(weights))
        source = weights.get(copied_from(name))
        if not marker and (source is None or not torch.equal(source, weights[name])):
            raise UserError(f"the checkpoint's {name} has no place in this architecture: it is not supported")


def copied_from(name: str) -> str:
    """Where the words and projections of a tied softmax stand in the embedding."""
    if name == "output_projection.weight":
        return "embed_tokens.weight"
    tail = re.fullmatch(r"adaptive_softmax\.tail\.(\d+)\.([02])\.weight", name)
    if tail:
        return f"embed_tokens.embeddings.{int(tail[1]) + 1}.{1 if tail[2] == '0' else 0}.weight"
    return "embed_tokens.embeddings.0.0.weight" if name == "adaptive_softmax.head.word_proj.weight" else ""
