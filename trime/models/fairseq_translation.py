"""Released translation checkpoints in fairseq's format (TRIME-MT: transformer_iwslt_de_en), converted to our networks."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from trime.errors import UserError
from trime.models.fairseq import PAD, FairseqCheckpoint, check_supported, has_final_norm, load_weights
from trime.models.network import Network, build_network

SUPPORTED = {  # arguments of fairseq's encoder-decoders that change the forward pass, and the values that are supported
    "encoder_learned_pos": (False, None),
    "decoder_learned_pos": (False, None),
    "no_token_positional_embeddings": (False, None),
    "no_scale_embedding": (False, None),
    "layernorm_embedding": (False, None),
    "activation_fn": ("relu", None),
    "adaptive_input": (False, None),
    "adaptive_softmax_cutoff": (None,),
    "no_decoder_final_norm": (False, None),
    "no_cross_attention": (False, None),
    "cross_self_attention": (False, None),
    "share_all_embeddings": (False, None),
}
SIDES = {"layers": "layers", "heads": "attention_heads", "inner": "ffn_embed_dim", "width": "embed_dim"}  # equal on both sides
POSITIONS = 1024  # fairseq's default
SUBLAYERS = {
    "attention": "self_attn",
    "cross": "encoder_attn",
    "attention_norm": "self_attn_layer_norm",
    "cross_norm": "encoder_attn_layer_norm",
    "ffn_norm": "final_layer_norm",
    "ffn.0": "fc1",
    "ffn.3": "fc2",
}
PROJECTIONS = {"q_proj": "q", "kv_proj": "kv", "out_proj": "out"}


def translation_network_from_checkpoint(checkpoint: FairseqCheckpoint) -> tuple[Network, dict[str, Any]]:
    """Return the network with the checkpoint's weights, and its configuration; UserError where a weight has no counterpart."""
    try:
        description = model_config(checkpoint)
        vocabulary = len(checkpoint.weights["embed_tokens.weight"])
    except KeyError as error:
        raise UserError(f"the checkpoint lacks {error}: it is truncated, or of an architecture that is not supported") from None
    network = build_network(OmegaConf.create(description), vocabulary)
    return load_weights(network, checkpoint.weights, source_names), description


def model_config(checkpoint: FairseqCheckpoint) -> dict[str, Any]:
    """Return embedding, backbone and head in the form of conf/model; UserError where the model is not supported."""
    args, weights = checkpoint.args, checkpoint.weights
    if not str(args.get("arch", "")).startswith("transformer") or "encoder_layers" not in args:
        raise UserError(f"the checkpoint's architecture {args.get('arch')} is not supported, only transformer_iwslt_de_en is")
    check_supported(args, SUPPORTED)
    for name in SIDES.values():
        if args[f"encoder_{name}"] != args[f"decoder_{name}"]:
            raise UserError(f"the checkpoint's encoder_{name} and decoder_{name} differ, which is not supported")
    norm_first = {side: bool(args.get(f"{side}_normalize_before")) for side in ("encoder", "decoder")}
    if norm_first["decoder"] != has_final_norm(weights):
        raise UserError("the checkpoint has no norm after its pre-norm decoder, or one after a post-norm one: not supported")
    backbone = {
        "_target_": "trime.models.backbones.encoder_decoder.EncoderDecoder",
        **{ours: args[f"decoder_{theirs}"] for ours, theirs in SIDES.items() if ours != "width"},
        "positions": min(args.get(f"max_{side}_positions") or POSITIONS for side in ("source", "target")),
        "key": "f",  # translation.key overrides it
        "pad": PAD,
        "source_vocabulary": len(weights["encoder.embed_tokens.weight"]),
        **{f"{side}_norm_first": first for side, first in norm_first.items()},
    }
    embedding = {"_target_": "trime.models.layers.embeddings.PlainInput", "width": args["decoder_embed_dim"], "pad": PAD}
    tied = bool(args.get("share_decoder_input_output_embed"))
    return {
        "embedding": embedding,
        "backbone": backbone,
        "head": {"_target_": "trime.models.layers.heads.Softmax", "tied": tied},
    }


def source_names(name: str) -> list[str]:
    """Return the names of the checkpoint's weights that are concatenated in a parameter of the network."""
    part, module, *rest = name.split(".")
    names = {
        "embedding": "embed_tokens.weight",
        "source_embedding": "encoder.embed_tokens.weight",
        "encoder_norm": f"encoder.layer_norm.{rest[-1] if rest else ''}",
        "final_norm": f"layer_norm.{rest[-1] if rest else ''}",
    }
    if part == "head":
        return ["output_projection.weight"]
    if module in names:
        return [names[module]]
    number, *sublayer, kind = rest
    layer = f"{'encoder.' if module == 'encoder' else ''}layers.{number}"
    if sublayer[-1] in PROJECTIONS:
        attention = f"{layer}.{SUBLAYERS[sublayer[0]]}"
        projections = ("k", "v") if sublayer[-1] == "kv_proj" else (PROJECTIONS[sublayer[-1]],)
        return [f"{attention}.{projection}_proj.{kind}" for projection in projections]
    return [f"{layer}.{SUBLAYERS['.'.join(sublayer)]}.{kind}"]
