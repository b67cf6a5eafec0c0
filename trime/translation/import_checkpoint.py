"""Released encoder-decoders in fairseq's format (TRIME-MT: transformer_iwslt_de_en), and the dictionaries of both languages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trime.common.urls import local_copy
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.fairseq import (
    BOTH,
    PAD,
    PLAIN_INPUT,
    SOFTMAX,
    SUBLAYERS,
    FairseqCheckpoint,
    check_supported,
    convert,
    has_final_norm,
)
from trime.models.network import Network, save_network
from trime.stages.import_checkpoint import Import, check_size
from trime.stages.model_io import write_description

POSITIONS = 1024  # fairseq's default
SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*BOTH, "encoder_learned_pos", "layernorm_embedding", "adaptive_input"), (False, None)),
    **dict.fromkeys(("no_decoder_final_norm", "no_cross_attention", "cross_self_attention"), (False, None)),
    "share_all_embeddings": (False, None),
    "activation_fn": ("relu", None),
    "adaptive_softmax_cutoff": (None,),
}
SIDES = {"layers": "layers", "heads": "attention_heads", "inner": "ffn_embed_dim", "width": "embed_dim"}  # equal on both sides
SOURCE, TARGET = "source.vocabulary.json", "vocabulary.json"


class Dictionaries(NamedTuple):
    """The vocabularies of both languages."""

    source: Vocabulary
    target: Vocabulary

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of both vocabularies."""
        return [self.source.fingerprint, self.target.fingerprint]


@dataclass(frozen=True, eq=False, repr=False)
class ImportTranslation(Import):
    """Import with two dictionaries, the source language's first; it adds ``source.vocabulary.json``."""

    @cached_property
    def files(self) -> list[Path]:
        """The dictionary files of source and target; UserError if there are not two."""
        names = self.dictionary
        if not isinstance(names, list) or len(names) != 2:
            raise UserError(
                f"checkpoint={self.file} is a file: name its fairseq dictionaries too, 'dictionary=[dict.de.txt,dict.en.txt]', "
                "the source language's first"
            )
        return [local_copy(file) for file in names]

    @cached_property
    def dictionaries(self) -> Dictionaries:
        """The dictionaries in which text is read."""
        return Dictionaries(*map(Vocabulary.from_dictionary, self.files))

    def identity(self) -> Any:
        return {"checkpoint": self.content, "vocabulary": self.dictionaries.fingerprints}

    def convert(self, folder: Path, released: FairseqCheckpoint) -> Network:
        network, description = network_from_checkpoint(released)
        tables = network.backbone.source_embedding, network.backbone.embedding
        for file, vocabulary, table in zip(self.files, self.dictionaries, tables, strict=True):
            check_size(file, vocabulary, table)
        save_network(network, folder / "model.safetensors")
        self.dictionaries.source.save(folder / SOURCE)
        self.dictionaries.target.save(folder / TARGET)
        write_description(folder, description, self.dictionaries.target, source=self.dictionaries.source)
        return network


def network_from_checkpoint(checkpoint: FairseqCheckpoint) -> tuple[Network, dict[str, Any]]:
    """Return an encoder-decoder, as ``network_from_checkpoint`` returns a language model."""
    return convert(checkpoint, describe, source_names)


def describe(checkpoint: FairseqCheckpoint) -> dict[str, Any]:
    """Return the same for an encoder-decoder."""
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
        "_target_": "trime.translation.encoder_decoder.EncoderDecoder",
        **{ours: args[f"decoder_{theirs}"] for ours, theirs in SIDES.items() if ours != "width"},
        "positions": min(args.get(f"max_{side}_positions") or POSITIONS for side in ("source", "target")),
        "key": "f",  # translation.key overrides it
        "pad": PAD,
        "source_vocabulary": len(weights["encoder.embed_tokens.weight"]),
        **{f"{side}_norm_first": first for side, first in norm_first.items()},
    }
    embedding = {"_target_": PLAIN_INPUT, "width": args["decoder_embed_dim"], "pad": PAD}
    head = {"_target_": SOFTMAX, "tied": bool(args.get("share_decoder_input_output_embed"))}
    return {"embedding": embedding, "backbone": backbone, "head": head}


def source_names(name: str) -> list[str]:
    """Return the names of the checkpoint's weights that are concatenated in a parameter of an encoder-decoder."""
    owner, module, *rest = name.split(".")
    names = {
        "embedding": "embed_tokens.weight",
        "source_embedding": "encoder.embed_tokens.weight",
        "encoder_norm": f"encoder.layer_norm.{rest[-1] if rest else ''}",
        "final_norm": f"layer_norm.{rest[-1] if rest else ''}",
    }
    if owner == "head":
        return ["output_projection.weight"]
    if module in names:
        return [names[module]]
    number, *sublayer, kind = rest
    layer = f"{'encoder.' if module == 'encoder' else ''}layers.{number}"
    projections = {"q_proj": ["q"], "kv_proj": ["k", "v"], "out_proj": ["out"]}.get(sublayer[-1])
    if projections:
        return [f"{layer}.{SUBLAYERS[sublayer[0]]}.{projection}_proj.{kind}" for projection in projections]
    return [f"{layer}.{SUBLAYERS['.'.join(sublayer)]}.{kind}"]
