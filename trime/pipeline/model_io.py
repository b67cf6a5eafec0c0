"""A trained model's folder: what a later stage needs to build the model again, and to read with it as is asked now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.data.vocabulary import Vocabulary
from trime.io import plain, write_atomically
from trime.models.network import Network, load_network
from trime.models.pretrained.tokenizer import load_tokenizer
from trime.pipeline.pretrained import is_pretrained, model_fingerprint
from trime.types import UserError


def model_of(config: DictConfig) -> dict[str, Any]:
    """The parts of conf/model that build a network."""
    return {name: plain(config.model[name]) for name in ("embedding", "backbone", "head")} | gate_settings(config)


def gate_settings(config: DictConfig) -> dict[str, bool]:
    """Of a model that has a gate, that it has one."""
    return {"gate": True} if config.model.get("gate") else {}


def weight_settings(config: DictConfig) -> dict[str, Any]:
    """What decides the weights: all of conf/model, or of a pretrained model what it is and how it is trained."""
    if is_pretrained(config):
        return {
            "weights": model_fingerprint(config.model.name),
            "lora": plain(config.model.lora),
            "dtype": config.model.dtype,
        } | gate_settings(config)
    return model_of(config)


def save_transformers(network: Network, config: DictConfig, folder: Path) -> None:
    """A continued model in the transformers format, with its tokenizer."""
    network.backbone.decoder.save(folder)  # type: ignore[operator,union-attr]
    load_tokenizer(config.model.name).save_pretrained(folder)


def write_description(
    folder: Path,
    model: dict[str, Any],
    vocabulary: Vocabulary,
    trained: dict[str, Any] | None = None,
    source: Vocabulary | None = None,
) -> None:
    """What a later stage needs to build the network again, and to refuse another vocabulary or pretrained model.

    ``source`` is the vocabulary of the language that is translated.
    """
    content = {"model": model, "vocabulary": len(vocabulary), "vocabulary_fingerprint": vocabulary.fingerprint}
    if source is not None:
        content["source_fingerprint"] = source.fingerprint
    content["trained"] = trained or model
    write_atomically(folder / "model.json", json.dumps(content, indent=1))


def open_network(folder: Path, config: DictConfig) -> tuple[Network, dict[str, Any]]:
    """The trained network, ready to evaluate with the configuration's quirks and memory, and its description."""
    try:
        described = json.loads((folder / "model.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} holds no model.json: name a folder that stage fit made") from None
    if ("memory" in described["model"]["backbone"]) != ("memory_size" in config.model):
        raise UserError(f"{folder} holds another kind of model than backbone= says: choose the one that it was trained with")
    if is_pretrained(config):
        if described["trained"] != weight_settings(config):
            raise UserError(
                f"{folder} was made from other weights than model.name={config.model.name} holds, or with other model.lora"
            )
        described["model"] = model_of(config)  # how it is read may change
    head, backbone = described["model"]["head"], described["model"]["backbone"]
    if config.task == "translation":  # what contexts are keyed by is how memories are read
        backbone["key"] = config.model.backbone.key
    if "dropped_in_band" in head:
        head["dropped_in_band"] = config.compatibility.dropped_in_band
    remember(described["model"], config)
    network = load_network(OmegaConf.create(described["model"]), described["vocabulary"], folder / "model.safetensors")
    return network.eval(), described


def remember(model: dict[str, Any], config: DictConfig) -> None:
    """Gives a described model evaluation's memory, if it has one inside."""
    if "memory" in model["backbone"]:
        model["backbone"]["memory"] |= memory_settings(config)


def memory_settings(config: DictConfig) -> dict[str, Any]:
    """Size and policy of the memory inside a model at evaluation; in training they are train's."""
    if "memory_size" not in config.model:
        return {}
    return {"size": plain(config.model.memory_size), "policy": plain(config.eviction)}


def reading_settings(config: DictConfig) -> dict[str, Any]:
    """What decides how a model with a memory inside reads text."""
    if not is_pretrained(config):
        return {"memory": memory_settings(config)} if memory_settings(config) else {}
    if not plain(config.model.memory_size):
        return {}
    model = model_of(config)
    return {"memory": memory_settings(config), "reading": model["backbone"] | model["embedding"] | {"name": None}}


def check_positions(positions: int | None, config: DictConfig, longest: int = 0) -> None:
    """Raises UserError where a segment or a window is longer than the model's positions; ``longest`` is the longest window.

    Those of a pretrained model are not known before it is loaded; with memories it reads windows of any length.
    """
    if positions is None or config.task == "translation":  # its sentences are whole
        return
    lengths = {"segments.length": config.segments.length} if config.train.updates else {}
    if not (is_pretrained(config) and plain(config.model.memory_size)):
        lengths["evaluate.block + evaluate.context"] = config.evaluate.block + config.evaluate.context
    for name, length in lengths.items():
        if length > positions:
            if is_pretrained(config):
                raise UserError(f"{name}={length} exceeds the model's {positions} positions: lower it")
            raise UserError(f"{name}={length} exceeds model.backbone.positions={positions}: lower it, or raise the positions")
    if longest > positions:
        raise UserError(
            f"a line with its context has {longest} tokens, which exceeds model.backbone.positions={positions}: "
            "set evaluate.lines=false, or raise the positions"
        )
