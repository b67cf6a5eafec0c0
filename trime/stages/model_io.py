"""The folder of a trained model: its description, and how it is loaded again under the present configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.common.identity import with_current_targets
from trime.common.io import plain, write_json
from trime.config.registry import GROUPS, unregistered
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.network import Network, load_network
from trime.stages.pretrained import model_fingerprint

CARRIED = "this model carries its state from window to window: set evaluate.context=0 and datastore.context=null"


@dataclass(frozen=True)
class ModelSettings:
    """The model of a configuration: how it is built, and how it reads at evaluation."""

    model: dict[str, Any]  # conf/model
    eviction: dict[str, Any]  # the policy of a memory inside the model, at evaluation
    dropped_in_band: bool
    chosen_at_test: tuple[str, ...] = ()  # settings of the backbone that a trained model takes from the configuration

    @classmethod
    def of(cls, config: DictConfig, chosen_at_test: tuple[str, ...] = ()) -> ModelSettings:
        """Return the settings of a configuration."""
        settings = plain(config.model), plain(config.eviction), config.compatibility.dropped_in_band
        return cls(*settings, chosen_at_test)

    @property
    def is_pretrained(self) -> bool:
        """Whether it is a model of transformers (model=pretrained)."""
        return "name" in self.model

    def components(self) -> dict[str, Any]:
        """Return the description of the network: embedding, backbone and head, and the gate if there is one."""
        gate = {"gate": True} if self.model.get("gate") else {}
        return copy.deepcopy({name: self.model[name] for name in ("embedding", "backbone", "head")}) | gate

    def weights(self) -> dict[str, Any]:
        """Return the settings on which weights depend: all; of a pretrained model, its own weights and their training."""
        if not self.is_pretrained:
            return self.components()
        gate = {"gate": True} if self.model.get("gate") else {}
        weights = model_fingerprint(self.model["name"])
        return {"weights": weights, "lora": self.model["lora"], "dtype": self.model["dtype"]} | gate

    def memory(self) -> dict[str, Any]:
        """Return size and policy of the memory inside the model at evaluation, if it has one; training has its own."""
        return {"size": self.model["memory_size"], "policy": self.eviction} if "memory_size" in self.model else {}

    def reading(self) -> dict[str, Any]:
        """Return the settings that decide how the model reads text, beside its weights."""
        content: dict[str, Any] = {"dropped_in_band": self.dropped_in_band, "key": self.model["backbone"].get("key")}
        if not self.is_pretrained:
            return content | ({"memory": self.memory()} if self.memory() else {})
        if not self.model["memory_size"]:
            return content
        own = self.components()
        return content | {"memory": self.memory(), "reading": own["backbone"] | own["embedding"] | {"name": None}}

    @property
    def reads_any_length(self) -> bool:
        """Whether a pretrained model reads with memories, and therefore texts that are longer than its positions."""
        return self.is_pretrained and bool(self.model["memory_size"])

    def with_memory(self, components: dict[str, Any]) -> dict[str, Any]:
        """Return the components of a network whose memory, if it has one, is that of evaluation."""
        if "memory" in components["backbone"]:
            components["backbone"]["memory"] |= self.memory()
        return components

    def open(self, folder: Path) -> tuple[Network, dict[str, Any]]:
        """Return the trained network of a folder, in evaluation mode with these settings, and its description.

        UserError if the folder holds no model, another kind of model, or one made from other pretrained weights.
        """
        description = self.read_description(folder)
        if ("memory" in description["model"]["backbone"]) != ("memory_size" in self.model):
            raise UserError(
                f"{folder} holds another kind of model than backbone= names: choose the backbone it was trained with"
            )
        if self.is_pretrained:
            if description["trained"] != self.weights():
                name = self.model["name"]
                raise UserError(f"{folder} was made from other weights than model.name={name} holds, or with other model.lora")
            description["model"] = self.components()  # settings of inference may have changed
        head, backbone = description["model"]["head"], description["model"]["backbone"]
        backbone |= {name: self.model["backbone"][name] for name in self.chosen_at_test}
        if "dropped_in_band" in head:
            head["dropped_in_band"] = self.dropped_in_band
        model = OmegaConf.create(self.with_memory(description["model"]))
        return load_network(model, description["vocabulary"], folder / "model.safetensors").eval(), description

    def read_description(self, folder: Path) -> dict[str, Any]:
        """Return ``model.json``; UserError where there is none, or it names code outside of the lab's models."""
        file = folder / "model.json"
        try:
            description = with_current_targets(json.loads(file.read_text(encoding="utf-8")))
            targets = [description["model"][name].get("_target_") for name in ("embedding", "backbone", "head")]
            is_complete = all(targets) and isinstance(description["vocabulary"], int) and "trained" in description
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            is_complete = False
        if not is_complete:
            raise UserError(f"{file} is missing or describes no model: name a folder that stage fit made")
        if unsafe := unregistered(description["model"], {"model": self.model, "eviction": self.eviction}):
            raise UserError(
                f"{file} has {unsafe}, which no file of conf/{{{','.join(GROUPS)}}} names, so that nothing of it was run: "
                "if it is your own class, name it in the present settings too"
            )
        return description


def write_description(
    folder: Path,
    model: dict[str, Any],
    vocabulary: Vocabulary,
    trained: dict[str, Any] | None = None,
    source: Vocabulary | None = None,
) -> None:
    """Write ``model.json``, which builds the network again and detects another vocabulary or pretrained model.

    ``source`` is the vocabulary of the source language of a translation model.
    """
    content = {"model": model, "vocabulary": len(vocabulary), "vocabulary_fingerprint": vocabulary.fingerprint}
    if source is not None:
        content["source_fingerprint"] = source.fingerprint
    content["trained"] = trained or model
    write_json(folder / "model.json", content)


def check_positions(positions: int | None, lengths: Mapping[str, int], is_pretrained: bool = False, longest: int = 0) -> None:
    """Raise UserError if a segment or a window, by the setting of its length, is longer than the positions of a model.

    ``longest`` is the longest window that was cut. None positions: the model has no limit, or is not loaded yet.
    """
    if positions is None:
        return
    for name, length in lengths.items():
        if length > positions:
            if is_pretrained:
                raise UserError(f"{name}={length} exceeds the model's {positions} positions: lower it")
            raise UserError(f"{name}={length} exceeds model.backbone.positions={positions}: lower it, or raise the positions")
    if longest > positions:
        raise UserError(
            f"a line with its context has {longest} tokens, which exceeds model.backbone.positions={positions}: "
            "set evaluate.lines=false, or raise the positions"
        )
