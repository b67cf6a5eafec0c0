"""The external memory (TRIME Eq. 4): keys, tokens and places of a corpus in shards, and its top-K evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trime.memory.objective.entries_cpu import entry_masses
from trime.memory.retrieval.search import Search
from trime.memory.similarity import similarity
from trime.types import Contexts, Float, Int, Mass, Tensor, UserError


class Shards:
    """Files ``00000.safetensors`` and so on, read through memory maps."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("[0-9]*.safetensors"))
        if not self.paths:
            raise UserError(f"{folder} holds no shards: delete it and run stages encode and datastore")
        self.files: list[Any] = [self.open_shard(path) for path in self.paths]

    @staticmethod
    def open_shard(path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or no shard ({error}): delete its folder and run again") from None

    def column(self, name: str) -> Tensor:
        """One column of all shards."""
        return torch.cat([file.get_tensor(name) for file in self.files])

    def iter_columns(self, *names: str) -> Iterator[tuple[Tensor, ...]]:
        """Columns, shard by shard."""
        for file in self.files:
            yield tuple(file.get_tensor(name) for name in names)


DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I8": "int8"}  # by their names in safetensors' files


def stored_keys(g: Float[Tensor, "n d"], dtype: str) -> dict[str, Tensor]:
    """The columns that hold keys: in a type of numbers, or in 8 bits, with a scale for each key."""
    if dtype != "int8":
        return {"g": g.to(getattr(torch, dtype))}
    scale = g.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {"g": (g.float() / scale).round().to(torch.int8), "scale": scale.squeeze(1)}


class Keys:
    """Keys g [N d] of a store, or those of its entries ``first`` to ``last``; nothing is read before it is wanted."""

    def __init__(self, shards: Shards, first: int = 0, last: int | None = None):
        self.shards, sizes = shards, [file.get_slice("g").get_shape()[0] for file in shards.files]
        self.scaled = "scale" in shards.files[0].keys()  # noqa: SIM118 (safetensors' files are no dictionaries)
        self.starts = torch.tensor([0, *sizes]).cumsum(0)
        self.first, self.last = first, int(self.starts[-1]) if last is None else last
        self.width: int = shards.files[0].get_slice("g").get_shape()[1]

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def dtype(self) -> str:
        """The precision of stored keys, as ``datastore.dtype`` has it."""
        return DTYPES[self.shards.files[0].get_slice("g").get_dtype()]

    def blocks(self) -> Iterator[Float[Tensor, "m d"]]:
        """All keys in order, a shard at a time."""
        for file, start, end in zip(self.shards.files, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            own = slice(max(0, self.first - start), min(end, self.last) - start)
            if own.start < own.stop:
                keys = file.get_slice("g")[own]
                yield (keys * file.get_slice("scale")[own][:, None]).half() if self.scaled else keys

    def take(self, index: Int[Tensor, "n k"]) -> Float[Tensor, "n k d"]:
        """The stored keys of entries, numbered through the whole store."""
        flat = index.flatten()
        shard = torch.bucketize(flat, self.starts, right=True) - 1
        found = torch.empty(len(flat), self.width)
        for number in shard.unique().tolist():
            chosen = (shard == number).nonzero().squeeze(1)
            file, index_ = self.shards.files[number], flat[chosen] - self.starts[number]
            found[chosen] = file.get_tensor("g")[index_].float()
            if self.scaled:
                found[chosen] *= file.get_tensor("scale")[index_, None]
        return found.view(*index.shape, self.width)


class Datastore:
    """What the model predicted where: keys g [N d], the tokens that followed, their documents."""

    def __init__(self, folder: Path):
        shards = Shards(folder)
        self.token, self.document = shards.column("token"), shards.column("document")
        self.keys = Keys(shards)

    def __len__(self) -> int:
        return len(self.token)


class KNNMemory:
    """The K entries of a datastore nearest to each query: kNN(M_ext, g(c)) of TRIME Eq. 7.

    ``rescore`` computes the similarity to the stored keys, where the search only estimates it (the
    papers' dagger rows). ``hide_own`` leaves out entries of the query's own document, for a datastore
    built from the split that is being scored.
    """

    def __init__(self, store: Datastore, search: Search, k: int, metric: str, rescore: bool, hide_own: bool = False):
        check_k(k, len(store))
        self.store, self.search, self.k, self.metric = store, search, k, metric
        self.rescore, self.hide_own = rescore, hide_own

    @property
    def kind(self) -> str:
        """How the figures of this memory came about."""
        return self.search.kind + (", rescored" if self.rescore else "")

    def entries(self, query: Contexts) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Similarity, token and number of the nearest entries; -inf similarity where there are fewer."""
        score, index = self.search.nearest(query.g, self.k)
        index = index.cpu().clamp(min=0)  # approximate search fills up with -1 at similarity -inf
        if self.rescore:
            keys = self.store.keys.take(index).to(query.g)
            score = torch.where(score.isinf(), score, similarity(query.g[:, None], keys, self.metric).squeeze(1))
        if self.hide_own:
            own = self.store.document[index].to(score.device) == query.place.document[:, None]
            score = score.masked_fill(own, -math.inf)
        return score, self.store.token[index].long().to(score.device), index


def check_k(k: int, entries: int) -> None:
    """UserError where there are fewer entries."""
    if k > entries:
        raise UserError(f"index.k={k} of {entries} entries: lower index.k (translation.k) or raise datastore.tokens")


def retrieved_mass(
    score: Float[Tensor, "n k"], token: Int[Tensor, "n k"], target: Int[Tensor, " n"], divisor: Float[Tensor, " t"]
) -> Mass:
    """Mass [t n] of entries for targets."""
    if score.device.type == "cpu" and score.dtype == torch.float32:
        return entry_masses(score, token, target, divisor)
    scores = score / divisor[:, None, None]
    return Mass(scores.masked_fill(token != target[:, None], -math.inf).logsumexp(-1), scores.logsumexp(-1))
