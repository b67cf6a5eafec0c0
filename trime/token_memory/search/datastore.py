"""The external memory (TRIME Eq. 4): keys, tokens and documents of a corpus in shards, and its nearest entries."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trime.common.checks import check_choice, check_floats, check_number, check_object, check_whole_numbers
from trime.common.choices import METRICS
from trime.common.io import partial_of, write_json, write_tensors
from trime.common.types import Contexts, Float, Int, LogMass, Tensor
from trime.errors import UserError
from trime.token_memory.search.search import ExactSearch, Search
from trime.token_memory.similarity import similarity
from trime.token_memory.train.objective.blockwise_cpu import entry_masses

RESCORED = 2**26  # values of stored keys that are read at once to compute similarities
DTYPE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I8": "int8"}  # by their names in safetensors files
SHARD = 2**17  # keys of a file that from_tensors writes
SUMMARY = "encode.json"  # beside the shards: how many entries they hold, in all


class Shards:
    """Files ``00000.safetensors`` and so on, read through memory maps; UserError if there are none, or one is damaged."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("[0-9]*.safetensors"))
        if not self.paths:
            raise UserError(f"{folder} holds no shards: delete it and run stages encode and index")
        for number, path in enumerate(self.paths):
            if path.stem != f"{number:05d}":
                raise UserError(
                    f"{folder} has {path.name} where {number:05d}.safetensors should be: copy the whole folder again"
                )
        self.files: list[Any] = []
        for path in self.paths:
            try:
                self.files.append(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a shard ({error}): delete its folder and run again") from None

    def column(self, name: str) -> Tensor:
        """Return a column of all shards; UserError where they have none of this name."""
        try:
            return torch.cat([file.get_tensor(name) for file in self.files])
        except SafetensorError:
            raise UserError(f"{self.paths[0].parent} is no datastore: its shards have no column {name}") from None

    def iter_columns(self, *names: str, first: int = 0, last: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Yield the named columns, shard by shard; of the entries ``first`` to ``last``."""
        end = 0
        for file in self.files:
            start, end = end, end + file.get_slice(names[0]).get_shape()[0]
            low, high = max(first, start) - start, (end if last is None else min(last, end)) - start
            if low < high:
                yield tuple(file.get_slice(name)[low:high] for name in names)


def stored_keys(g: Float[Tensor, "n d"], dtype: str, setting: str = "dtype") -> dict[str, Tensor]:
    """Return the columns that store keys: in a floating-point type, or in 8 bits with a scale for each key.

    Raises UserError for keys that are not finite, or that the type cannot hold; ``setting`` is the one that names it.
    """
    read_as = torch.float16 if dtype == "int8" else getattr(torch, dtype)  # see Keys.blocks
    of_each = g.abs().amax(1)
    largest = float(of_each.max()) if len(g) else 0.0
    if not math.isfinite(largest):
        raise UserError(f"{int((~g.isfinite()).any(1).sum())} of {len(g)} keys hold NaN or infinity: see what computed them")
    if largest > math.sqrt(torch.finfo(torch.float32).max / g.shape[1]):
        raise UserError(f"keys reach {largest:.3g}, so that their inner products overflow: scale keys and queries down")
    if few := int(((of_each > 0) & (of_each < torch.finfo(read_as).tiny)).sum()):
        remedy = "" if dtype == "float32" else f', or set {setting}="float32"'
        raise UserError(
            f"{few} of {len(g)} keys are so small that {setting}={dtype} would round them to few digits or zero: scale keys "
            f"and queries up{remedy}"
        )
    if not g.to(read_as).isfinite().all():
        raise UserError(
            f"keys reach {largest:,.0f}, and {setting}={dtype} holds numbers up to {torch.finfo(read_as).max:,.0f}: set "
            f'{setting}="float32"'
        )
    if dtype != "int8":
        return {"g": g.to(read_as)}
    scale = of_each.float()[:, None].clamp(min=1e-12) / 127
    return {"g": (g.float() / scale).round().to(torch.int8), "scale": scale.squeeze(1)}


def stored_numbers(numbers: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return whole numbers in 32 bits, which halves their size on disk, or in 64 where they do not fit."""
    limits = torch.iinfo(torch.int32)
    fit = not len(numbers) or (numbers.min() >= limits.min and numbers.max() <= limits.max)
    return numbers.int() if fit else numbers.long()


class Keys:
    """The keys g [N d] of a store, or of its entries ``first`` to ``last``, read when they are needed."""

    def __init__(self, shards: Shards, first: int = 0, last: int | None = None):
        self.shards, sizes = shards, [file.get_slice("g").get_shape()[0] for file in shards.files]
        self.scaled = "scale" in shards.files[0].keys()  # noqa: SIM118 (not a dictionary)
        self.starts = torch.tensor([0, *sizes]).cumsum(0)
        self.first, self.last = first, int(self.starts[-1]) if last is None else last
        self.width: int = shards.files[0].get_slice("g").get_shape()[1]

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def dtype(self) -> str:
        """Return the type of stored keys, by its name in ``datastore.dtype``."""
        return DTYPE_NAMES[self.shards.files[0].get_slice("g").get_dtype()]

    def blocks(self) -> Iterator[Float[Tensor, "m d"]]:
        """Yield all keys in order, a shard at a time."""
        for file, start, end in zip(self.shards.files, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            rows = slice(max(0, self.first - start), min(end, self.last) - start)
            if rows.start < rows.stop:
                keys = file.get_slice("g")[rows]
                yield (keys * file.get_slice("scale")[rows][:, None]).half() if self.scaled else keys

    def by_shard(self) -> list[Keys]:
        """Return the keys of each shard of the store."""
        return [Keys(self.shards, first, last) for first, last in pairwise(self.starts.tolist())]

    def take(self, index: Int[Tensor, "n k"]) -> Float[Tensor, "n k d"]:
        """Return the stored keys of entries by their numbers in the whole store, in float32."""
        flat = index.flatten()
        shard = torch.bucketize(flat, self.starts, right=True) - 1
        keys = torch.empty(len(flat), self.width)
        for number in shard.unique().tolist():
            rows = (shard == number).nonzero().squeeze(1)
            file, index_ = self.shards.files[number], flat[rows] - self.starts[number]
            keys[rows] = file.get_tensor("g")[index_].float()
            if self.scaled:
                keys[rows] *= file.get_tensor("scale")[index_, None]
        return keys.view(*index.shape, self.width)


class Datastore:
    """The encoded contexts of a corpus: keys g [N d], the tokens that followed, and their documents, in a folder of shards."""

    def __init__(self, folder: str | Path):
        shards = Shards(Path(folder))
        self.token, self.document = shards.column("token"), shards.column("document")
        stored = entries_written(Path(folder))
        if len(self.token) < stored:
            raise UserError(f"{folder} has {len(self.token):,} of {stored:,} entries: copy the whole folder again")
        self.keys = Keys(shards)

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Open a datastore that ``from_tensors`` or a run wrote; UserError if there is none."""
        return cls(folder)

    @classmethod
    def from_tensors(
        cls,
        folder: str | Path,
        keys: Float[Tensor, "n d"],
        tokens: Int[Tensor, " _"],
        documents: Int[Tensor, " _"] | None = None,
        dtype: str = "float16",
    ) -> Datastore:
        """Write keys and the tokens that followed into a new folder and open it.

        ``dtype``: float16, bfloat16, float32 or int8. Raises UserError where the folder holds files already, lengths differ, or
        keys are not finite or too large for the type.
        """
        folder = Path(folder)
        check_choice("dtype", dtype, DTYPE_NAMES.values())
        check_floats("keys", keys, 2)
        check_whole_numbers("tokens", tokens, 1)
        documents = torch.zeros(len(tokens), dtype=torch.long) if documents is None else documents
        check_whole_numbers("documents", documents, 1)
        if not len(keys) == len(tokens) == len(documents):
            raise UserError(
                f"{len(keys)} keys, {len(tokens)} tokens, {len(documents)} documents: there must be as many of each"
            )
        if not len(keys):
            raise UserError("a datastore needs at least one key")
        if tokens.min() < 0:
            raise UserError(f"tokens has {int(tokens.min())}: tokens are numbered from 0")
        partial = partial_of(folder)
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"{folder} is not empty: open the datastore in it, or name another folder")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}; name another folder") from None
        for number, first in enumerate(range(0, len(keys), SHARD)):
            rows = slice(first, first + SHARD)
            columns = stored_keys(keys[rows].detach().cpu(), dtype)
            columns |= {"token": stored_numbers(tokens[rows].cpu()), "document": stored_numbers(documents[rows].cpu())}
            write_tensors(partial / f"{number:05d}.safetensors", columns)
        write_json(partial / SUMMARY, {"tokens": len(keys), "width": keys.shape[1]})
        partial.replace(folder)
        return cls(folder)

    def __len__(self) -> int:
        return len(self.token)


def entries_written(folder: Path) -> int:
    """Return the number of entries that a datastore had when written, 0 of earlier versions; UserError if damaged."""
    file = folder / SUMMARY
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["tokens"]) if file.exists() else 0
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is damaged: copy the whole folder again") from None


class KNNMemory:
    """The ``k`` entries of a datastore nearest to each query, kNN(M_ext, g(c)) in TRIME Eq. 7.

    ``rescore`` computes similarities to the stored keys, where the search only estimates them (the rows marked by a dagger
    in the papers). ``search`` is exact by default. ``hide_own`` hides entries of the query's own document, for a datastore of
    the split that is scored. UserError where the datastore has fewer entries.
    """

    def __init__(
        self,
        store: Datastore,
        search: Search | None = None,
        k: int = 1024,
        metric: str = "ip",
        rescore: bool = False,
        hide_own: bool = False,
    ):
        check_object("store", store, Datastore, "Datastore.open(folder)")
        check_number("k", k, at_least=1, whole=True)
        check_k(k, len(store))
        check_choice("metric", metric, METRICS)
        if search is not None:
            check_object("search", search, Search, "None for exact search")
        search = search or ExactSearch(store.keys.blocks, metric)
        self.store, self.search, self.k, self.metric = store, search, k, metric
        self.rescore, self.hide_own = rescore, hide_own

    @property
    def kind(self) -> str:
        """Return the kind of the search, as reports name it."""
        return self.search.kind + (", rescored" if self.rescore else "")

    def entries(self, query: Contexts) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the similarity, token and number of the nearest entries; similarity -inf where fewer are found."""
        return self.request(query)()

    def request(self, query: Contexts) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Start the search and return a callable that waits for ``entries``.

        Workers begin now; a search in this process begins when the callable is called.
        """
        check_object("query", query, Contexts, "the query of a Window")
        if query.g.shape[1] != self.store.keys.width:
            raise UserError(f"queries have width {query.g.shape[1]}, and the datastore's keys {self.store.keys.width}")
        if not query.g.isfinite().all():
            raise UserError("queries hold NaN or infinity: see what computed them")
        wait = self.search.begin(query.g, self.k) if hasattr(self.search, "begin") else None

        def entries() -> tuple[Tensor, Tensor, Tensor]:
            score, index = wait() if wait else self.search.nearest(query.g, self.k)
            if not (score < math.inf).all():
                raise UserError(
                    "similarities overflow: scale keys and queries down, or store float32 in an index that holds it"
                )
            index = index.cpu().clamp(min=0)  # missing entries have number -1 and similarity -inf
            if self.rescore:
                score = torch.where(score.isinf(), score, self.similarities(query.g, index))
            if self.hide_own:
                same_document = self.store.document[index].to(score.device) == query.positions.document[:, None]
                score = score.masked_fill(same_document, -math.inf)
            return score, self.store.token[index].long().to(score.device), index

        return entries

    def similarities(self, query: Float[Tensor, "n d"], index: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the similarities of queries to stored keys, which are read for a few queries at a time."""
        rows, result = max(1, RESCORED // (self.k * self.store.keys.width)), []
        for some, numbers in zip(query.split(rows), index.split(rows), strict=True):
            keys = self.store.keys.take(numbers).to(some)
            result.append(similarity(some[:, None], keys, self.metric).squeeze(1))
        return torch.cat(result)


def check_k(k: int, entries: int) -> None:
    """Raise a UserError if ``k`` exceeds the number of entries."""
    if k > entries:
        raise UserError(f"index.k={k} of {entries} entries: lower index.k (translation.k) or raise datastore.tokens")


def retrieved_mass(
    score: Float[Tensor, "n k"], token: Int[Tensor, "n k"], target: Int[Tensor, " n"], divisor: Float[Tensor, " t"]
) -> LogMass:
    """Return the mass [t n] of retrieved entries for the targets."""
    if score.device.type == "cpu" and score.dtype == torch.float32:
        return entry_masses(score, token, target, divisor)
    scores = score / divisor[:, None, None]
    return LogMass(scores.masked_fill(token != target[:, None], -math.inf).logsumexp(-1), scores.logsumexp(-1))
