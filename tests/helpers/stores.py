"""Datastores of random keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import torch
from safetensors.torch import save_file

from trime.token_memory.search.index import IndexSlice, build_slices, divides_by_cells, split_cells, split_entries

KEYS = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))


QUERY = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))


def blocks() -> Iterator[torch.Tensor]:
    """Yield the keys in blocks."""
    yield from KEYS.split(700)


def stored(folder: Path) -> Path:
    """Write a store of the keys, in shards that do not coincide with parts; return its folder."""
    store = folder_of(folder / "store")
    for number, keys in enumerate(blocks()):
        other = {name: torch.arange(len(keys)) for name in ("token", "document")}
        save_file({"g": keys, **other}, store / f"{number:05d}.safetensors")
    return store


def built(store: Path, count: int, factory: str | None, metric: str) -> list[IndexSlice]:
    """Build an index in ``count`` parts."""
    folder = folder_of(store.parent / f"index-{count}")
    parts = split_entries(store, count, folder, factory, metric)
    build_slices(parts, folder, Mock())
    return parts


def divided(store: Path, count: int, factory: str | None, metric: str) -> Sequence[IndexSlice]:
    """Return the parts of an index for ``count`` workers: some cells of a single one, or indexes of some keys."""
    if divides_by_cells(factory):
        return split_cells(built(store, 1, factory, metric)[0], count)
    return built(store, count, factory, metric)


def folder_of(path: Path) -> Path:
    """Make a folder and return it."""
    path.mkdir()
    return path
