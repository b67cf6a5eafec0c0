"""A complete language model: embedding, backbone and output head, built from conf/model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trime.common.components import build
from trime.common.io import write_tensors
from trime.common.types import Batch, Contexts, Encoding, Float, Int, LogMass, Tensor, contexts_of
from trime.errors import UserError
from trime.layers.attention import AttentionTrace, mean_trace

INITIAL_GATE_LOGIT = -2.0  # sigmoid(-2) = 0.12: the memories' share before training
PART = "part"  # marks a file without the frozen weights


class Network(nn.Module):
    """A backbone that encodes tokens as (f, g), and a head that turns f into the mass of every token.

    Tables may be shared between embedding and head. ``gate`` is the width of f: a linear gate then learns the memories' share
    from f, in place of their mass (footnote 6 of TRIME); None: there is no gate.
    """

    backbone: Any
    head: Any

    def __init__(self, backbone: nn.Module, head: nn.Module, gate: int | None = None):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.gate = nn.Linear(gate, 1) if gate else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, INITIAL_GATE_LOGIT)

    def forward(self, *inputs: Any) -> Any:
        """Return the backbone's output for a batch. To call this, not the backbone, lets FSDP gather sharded weights."""
        return self.backbone(*inputs)

    def compile_layers(self) -> None:
        """Compile each layer of the backbone in place; UserError where it has no list of layers."""
        layers = [layer for part in self.backbone.children() if isinstance(part, nn.ModuleList) for layer in part]
        if not layers:
            raise UserError(f"trainer.compile=true cannot compile {type(self.backbone).__name__}: leave it out for this model")
        for layer in layers:
            layer.compile()

    @property
    def is_stateful(self) -> bool:
        """True where rows continue from batch to batch: the backbone has a state, and no window has a context of its own."""
        return bool(self.backbone.is_stateful)

    @property
    def has_cache(self) -> bool:
        """True where the backbone goes on with a window from a cache of its first tokens, as its state."""
        return bool(getattr(self.backbone, "has_cache", False))

    @property
    def width(self) -> int:  # of g
        return int(self.backbone.width)

    def vocabulary_mass(self, f: Tensor, target: Int[Tensor, " n"]) -> LogMass:
        """Return the vocabulary's mass for the targets, with the gate's log-odds where there is a gate."""
        mass: LogMass = self.head.mass(f, target)
        return mass if self.gate is None else replace(mass, gate=self.gate_logits(f).squeeze(1).to(mass.total))

    def gate_logits(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        """Return the gate's log-odds of the memories."""
        assert self.gate is not None
        return self.gate(f.to(self.gate.weight.dtype))

    def record_attention(self) -> None:
        """Make layers with a state keep the attention of the last query for ``attention_trace`` from now on."""
        if self.is_stateful:
            self.backbone.record_attention()

    def attention_trace(self) -> AttentionTrace | None:
        """Return the last query's attention to earlier segments; None where nothing was recorded."""
        return mean_trace(self.backbone.attention_traces()) if self.is_stateful else None

    def training_metrics(self) -> dict[str, Tensor]:
        """Return the values that a stateful backbone's layers log in training, such as those of gates."""
        return self.backbone.training_metrics() if self.is_stateful else {}

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())  # shared ones are counted once


class Reader:
    """Reads batch after batch with a network and keeps the state of its rows from one batch to the next."""

    def __init__(self, network: Network):
        self.network, self.state = network, None

    def encode(self, batch: Batch) -> Encoding:
        """Return f and g of every token; rows marked ``fresh`` start a new document."""
        if batch.source is not None:
            return self.network(batch.source, batch.tokens)
        encoding, self.state = self.network(batch.tokens, self.state, batch.fresh)
        return encoding

    def contexts_and_mass(self, batch: Batch) -> tuple[Contexts, LogMass]:
        """Return every cell as a context, padding included, and the vocabulary's mass for the scored cells."""
        encoding = self.encode(batch)
        contexts, f, scored = contexts_of(batch, encoding.g), encoding.f.flatten(0, 1), batch.scored.flatten()
        if scored.all():  # no copy of f
            return contexts, self.network.vocabulary_mass(f, contexts.token)
        return contexts, self.network.vocabulary_mass(f[scored], contexts.token[scored])

    def state_tensors(self) -> list[Tensor]:
        """Return the state as a list of tensors, rows first; an empty list where there is no state."""
        return [] if self.state is None else tree_flatten(self.state)[0]

    def restore(self, tensors: list[Tensor], device: Any) -> None:
        if not tensors:
            self.state = None
            return
        # A state is nested as the backbone nests it: a fresh one of a single row shows how, and the types.
        references, structure = tree_flatten(self.network.backbone.initial_state(1))
        pairs = zip(tensors, references, strict=True)
        self.state = tree_unflatten([tensor.to(device, reference.dtype) for tensor, reference in pairs], structure)


def build_network(model: Any, vocabulary: int) -> Network:
    """Build the network that conf/model describes, for a vocabulary of that size; UserError where its settings are invalid."""
    embedding, backbone, head = (build(model[name], _partial_=True) for name in ("embedding", "backbone", "head"))
    try:
        table = embedding(vocabulary=vocabulary)
        return Network(backbone(embedding=table), head(embedding=table), table.width if model.get("gate") else None)
    except (ValueError, TypeError) as error:  # invalid values, or settings that a class does not have
        raise UserError(str(error)) from error


def shard_weights(network: Network, mesh: Any) -> None:
    """Shard every weight, its gradient and the optimizer's state over the devices of a mesh (FSDP)."""
    from torch.distributed.fsdp import fully_shard  # the import takes half a second, and few runs need it

    # A layer's weights are gathered when it is used; all others stay gathered for the head, until the update.
    for child in network.backbone.children():
        for layer in child if isinstance(child, nn.ModuleList) else []:
            fully_shard(layer, mesh=mesh)
    if hasattr(network.head, "is_sharded"):
        network.head.is_sharded = True
    fully_shard(network, mesh=mesh, reshard_after_forward=False)


def save_network(network: Network, path: Path, base: str = "") -> None:
    """Write the weights, shared ones once; of a partly frozen model those that were trained, and ``base``, the others' name."""
    if all(parameter.requires_grad for parameter in network.parameters()):
        write_tensors(path, without_aliases(network.state_dict()))
        return
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    write_tensors(path, trained, {"weights": PART, "base": base})


def without_aliases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor under its first name only: tied weights share memory, which safetensors refuses."""
    # Reversed, so that the first name of a shared tensor is the one that stays.
    names = {(weight.data_ptr(), weight.shape): name for name, weight in reversed(weights.items()) if weight.numel()}
    return {name: weight for name, weight in weights.items() if name in {*names.values()} or not weight.numel()}


def load_network(model: Any, vocabulary: int, path: Path) -> Network:
    """Build a network and load its weights from a file; UserError where they do not fit."""
    network = build_network(model, vocabulary)
    try:
        with safe_open(str(path), "pt") as file:
            is_part = json.loads((file.metadata() or {}).get("note", "{}")).get("weights") == PART
        load_model(network, str(path), strict=not is_part)
    except Exception as error:  # safetensors raises several kinds, none of them public
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} does not hold this model's weights ({reason}): delete its folder and run stage fit") from None
    return network
