"""A whole language model: embedding, backbone and head, built from conf/model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trime.models.attention_trace import AttentionTrace, mean_of
from trime.types import Batch, Encoding, Float, Int, Mass, Tensor, UserError

FIRST_ODDS = -2.0  # of a gate before it has learned: the memories have 12 %
PART = "part"  # a file that does not hold the weights that were frozen


class Network(nn.Module):
    """Tokens to (f, g) by ``backbone``, f to evidence by ``head``; tables may be shared between them.

    ``gate``, the width of f: what f says of the memories' share is learned, in place of their mass (footnote 6 of TRIME).
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, gate: int | None = None):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.gate = nn.Linear(gate, 1) if gate else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, FIRST_ODDS)

    def forward(self, *given: Any) -> Any:
        """What the backbone makes of a batch: with these weights gathered, where they are shared out over devices."""
        return self.backbone(*given)

    @property
    def is_stateful(self) -> bool:
        """Rows read on from batch to batch: the backbone has a state, and no window has a context of its own."""
        return bool(self.backbone.is_stateful)

    def figures(self) -> dict[str, Tensor]:
        """What the backbone tells of itself in training, such as gates."""
        return self.backbone.figures()  # type: ignore[operator]

    def tell(self) -> None:
        """From now on ``looked`` is known, where layers carry something on."""
        if self.is_stateful:
            self.backbone.tell()  # type: ignore[operator]

    def looked(self) -> AttentionTrace | None:
        """Where the last query looked among what layers carry on; None where there is nothing to look at."""
        return mean_of(self.backbone.looked()) if self.is_stateful else None  # type: ignore[operator]

    @property
    def width(self) -> int:
        """Width of g."""
        return self.backbone.width  # type: ignore[return-value]

    @property
    def parameter_count(self) -> int:
        """Numbers that it holds, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def vocabulary_mass(self, f: Tensor, target: Int[Tensor, " n"]) -> Mass:
        """The vocabulary's evidence for targets, with the gate where there is one."""
        mass: Mass = self.head.evidence(f, target)  # type: ignore[operator]
        return mass if self.gate is None else replace(mass, gate=self.odds(f).squeeze(1).to(mass.total))

    def odds(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        """The gate's log-odds of the memories."""
        assert self.gate is not None
        return self.gate(f.to(self.gate.weight.dtype))


class Reader:
    """A network that reads batch after batch, and what its rows carry from one to the next."""

    def __init__(self, network: Network):
        self.network, self.state = network, None

    def encode(self, batch: Batch) -> Encoding:
        """Both representations of every cell; rows that are fresh start a document."""
        if batch.source is not None:
            return self.network(batch.source, batch.tokens)
        encoding, self.state = self.network(batch.tokens, self.state, batch.fresh)
        return encoding

    def saved(self) -> list[Tensor]:
        """The state as a list of tensors, rows first; empty where there is none."""
        return [] if self.state is None else tree_flatten(self.state)[0]

    def restore(self, saved: list[Tensor], device: Any) -> None:
        """Goes on from a saved state."""
        like, form = tree_flatten(self.network.backbone.start(1))  # type: ignore[operator]
        self.state = tree_unflatten([a.to(device, b.dtype) for a, b in zip(saved, like, strict=True)], form) if saved else None


def build_network(model: Any, vocabulary: int) -> Network:
    """The network that conf/model describes, for a vocabulary of that size; UserError where it is impossible."""
    try:
        parts = (instantiate(model[part], _partial_=True, _convert_="all") for part in ("embedding", "backbone", "head"))
        embedding, backbone, head = parts
        table = embedding(vocabulary=vocabulary)
        return Network(backbone(embedding=table), head(embedding=table), table.width if model.get("gate") else None)
    except (ValueError, TypeError) as error:  # impossible values, or names that a part does not know
        raise UserError(str(error)) from error
    except InstantiationException as error:  # of a part inside a part
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from error


def share_out(network: Network, mesh: Any) -> None:
    """Every device of a mesh keeps a part of each weight, of its gradient and of the optimiser's state (FSDP).

    A layer's weights are gathered when it is used; those outside of layers stay gathered for the head, until the update.
    """
    from torch.distributed.fsdp import fully_shard  # half a second, for few

    for child in network.backbone.children():
        for layer in child if isinstance(child, nn.ModuleList) else []:
            fully_shard(layer, mesh=mesh)
    if hasattr(network.head, "shared_out"):
        network.head.shared_out = True  # type: ignore[assignment]
    fully_shard(network, mesh=mesh, reshard_after_forward=False)


def save_network(network: Network, path: Path, base: str = "") -> None:
    """Writes the weights as safetensors, shared ones once; of a model that is frozen in part, those that were trained.

    ``base`` names the frozen ones, so that files of other models are other files.
    """
    if all(parameter.requires_grad for parameter in network.parameters()):
        save_model(network, str(path))
        return
    trained = {name: own.detach().contiguous() for name, own in network.named_parameters() if own.requires_grad}
    save_file(trained, str(path), {"weights": PART, "base": base})


def load_network(model: Any, vocabulary: int, path: Path) -> Network:
    """The network with weights from a file; UserError where they do not fit."""
    network = build_network(model, vocabulary)
    try:
        with safe_open(str(path), "pt") as file:
            part = (file.metadata() or {}).get("weights") == PART
        load_model(network, str(path), strict=not part)
    except Exception as error:  # safetensors raises several kinds, none of them public
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} does not hold this model's weights ({reason}): delete its folder and run stage fit") from None
    return network
