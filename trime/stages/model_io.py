"""The folder of a trained model: its description, and how it is loaded again under the present configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.common.io import plain, write_json
from trime.config.registry import GROUPS, unregistered
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.network import Network, load_network
from trime.models.pretrained.tokenizer import load_tokenizer
from trime.stages.pretrained import is_pretrained, model_fingerprint

NETWORK = ("task", "model", "eviction", "compatibility.dropped_in_band")  # the settings that open_network reads
WINDOWS = ("evaluate.block", "evaluate.context", "datastore.block", "datastore.context")  # window_sizes
POSITIONS = ("task", "model", "segments.length", "train.updates", *WINDOWS)  # check_positions
CARRIED = "this model carries its state from window to window: set evaluate.context=0 and datastore.context=null"


def model_of(config: DictConfig) -> dict[str, Any]:
    """Return the parts of conf/model that build a network."""
    return {name: plain(config.model[name]) for name in ("embedding", "backbone", "head")} | gate_settings(config)


def gate_settings(config: DictConfig) -> dict[str, bool]:
    """Return the gate setting; empty for models without a gate."""
    return {"gate": True} if config.model.get("gate") else {}


def weight_settings(config: DictConfig) -> dict[str, Any]:
    """Return the model settings that the weights depend on.

    That is all of conf/model; for a pretrained model, its own weights and how they are trained.
    """
    if is_pretrained(config):
        return {
            "weights": model_fingerprint(config.model.name),
            "lora": plain(config.model.lora),
            "dtype": config.model.dtype,
        } | gate_settings(config)
    return model_of(config)


def save_transformers(network: Network, config: DictConfig, folder: Path) -> None:
    """Save a fine-tuned pretrained model in the transformers format, with its tokenizer."""
    network.backbone.decoder.save(folder)
    load_tokenizer(config.model.name).save_pretrained(folder)


def write_description(
    folder: Path,
    model: dict[str, Any],
    vocabulary: Vocabulary,
    trained: dict[str, Any] | None = None,
    source: Vocabulary | None = None,
) -> None:
    """Write ``model.json``: what builds the network again and detects another vocabulary or pretrained model.

    ``source`` is the vocabulary of the source language of a translation model.
    """
    content = {"model": model, "vocabulary": len(vocabulary), "vocabulary_fingerprint": vocabulary.fingerprint}
    if source is not None:
        content["source_fingerprint"] = source.fingerprint
    content["trained"] = trained or model
    write_json(folder / "model.json", content)


def open_network(folder: Path, config: DictConfig) -> tuple[Network, dict[str, Any]]:
    """Return the trained network, in evaluation mode with the configuration's quirks and memory, and its description.

    UserError if the folder holds no model, another kind of model, or one made from other pretrained weights.
    """
    description = read_description(folder, config)
    if ("memory" in description["model"]["backbone"]) != ("memory_size" in config.model):
        raise UserError(f"{folder} holds another kind of model than backbone= names: choose the backbone it was trained with")
    if is_pretrained(config):
        if description["trained"] != weight_settings(config):
            raise UserError(
                f"{folder} was made from other weights than model.name={config.model.name} holds, or with other model.lora"
            )
        description["model"] = model_of(config)  # settings of inference may have changed
    head, backbone = description["model"]["head"], description["model"]["backbone"]
    if config.task == "translation":  # the key of contexts is a setting of inference
        backbone["key"] = config.model.backbone.key
    if "dropped_in_band" in head:
        head["dropped_in_band"] = config.compatibility.dropped_in_band
    set_evaluation_memory(description["model"], config)
    network = load_network(OmegaConf.create(description["model"]), description["vocabulary"], folder / "model.safetensors")
    return network.eval(), description


def read_description(folder: Path, config: DictConfig) -> dict[str, Any]:
    """Return the content of ``model.json``; UserError where there is none, or it names code outside of the lab's models."""
    file = folder / "model.json"
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        parts = [description["model"][name].get("_target_") for name in ("embedding", "backbone", "head")]
        is_complete = all(parts) and isinstance(description["vocabulary"], int) and "trained" in description
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_complete = False
    if not is_complete:
        raise UserError(f"{file} is missing or describes no model: name a folder that stage fit made")
    if unsafe := unregistered(description["model"], {"model": plain(config.model), "eviction": plain(config.eviction)}):
        raise UserError(
            f"{file} has {unsafe}, which no file of conf/{{{','.join(GROUPS)}}} names, so that nothing of it was run: "
            "if it is your own class, name it in the present settings too"
        )
    return description


def set_evaluation_memory(model: dict[str, Any], config: DictConfig) -> None:
    """Set size and eviction policy of the built-in memory in a model's description, if it has one, to those of evaluation."""
    if "memory" in model["backbone"]:
        model["backbone"]["memory"] |= memory_settings(config)


def memory_settings(config: DictConfig) -> dict[str, Any]:
    """Return size and policy of a model's built-in memory at evaluation; in training those of ``train`` apply."""
    if "memory_size" not in config.model:
        return {}
    return {"size": plain(config.model.memory_size), "policy": plain(config.eviction)}


def reading_settings(config: DictConfig) -> dict[str, Any]:
    """Return the settings that decide how a model with a built-in memory reads text."""
    if not is_pretrained(config):
        return {"memory": memory_settings(config)} if memory_settings(config) else {}
    if not plain(config.model.memory_size):
        return {}
    model = model_of(config)
    return {"memory": memory_settings(config), "reading": model["backbone"] | model["embedding"] | {"name": None}}


def window_sizes(config: DictConfig, for_datastore: bool = False) -> tuple[int, int]:
    """Return the tokens of a window and those of the context before it, in the text of a datastore or in evaluated text."""
    own, default = config.datastore, config.evaluate
    block = own.block if for_datastore and own.block is not None else default.block
    context = own.context if for_datastore and own.context is not None else default.context
    return block, context


def check_positions(positions: int | None, config: DictConfig, longest: int = 0, for_datastore: bool = False) -> None:
    """Raise UserError if a segment or a window is longer than the model's positions; ``longest`` is the longest window.

    ``for_datastore``: the windows of a datastore's text are checked, not those of evaluated text.
    A pretrained model's positions are known only once it is loaded; with memories it reads windows of any length.
    """
    if positions is None or config.task == "translation":  # it reads whole sentences
        return
    lengths = {"segments.length": config.segments.length} if config.train.updates else {}
    if not (is_pretrained(config) and plain(config.model.memory_size)):
        is_own = for_datastore and window_sizes(config, for_datastore) != window_sizes(config)
        section = "datastore" if is_own else "evaluate"
        lengths[f"{section}.block + {section}.context"] = sum(window_sizes(config, for_datastore))
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
