"""The rows of an experiment's table: those of the papers, as conf/experiment lists them, then that of ``mixture=``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from trime.common.io import plain
from trime.errors import UserError
from trime.scoring.mixture_spec import FittedMixtureSpec, Interpolation, MixtureSpec
from trime.scoring.scorer import memory_names
from trime.token_memory.test.base import MemoryTraits

NOT_FITTED = ("none", "joint", "interpolated")  # kinds of mixture without a model to fit
MixtureSpecs = list[MixtureSpec | FittedMixtureSpec]  # the rows of an experiment


def rows_of(config: DictConfig) -> MixtureSpecs:
    """Return all rows, those with a grid over the grid of ``tune``; a fitted mixture is not fitted yet.

    UserError if there is no row, one is not understood, or evaluate.memories names an unknown memory, names one twice, or is
    set without a mixture.
    """
    specifications, known = plain(config.evaluate.rows), tuple(config.test_memories)
    if not specifications:
        raise UserError(f"evaluate.rows={specifications}: name at least one row, for instance [{{joint: [local]}}]")
    rows: MixtureSpecs = [parse_row(specification, config) for specification in specifications]
    mixed, used = plain(config.evaluate.memories), memory_names(rows)
    names = tuple(mixed) if mixed is not None else tuple(name for name in known if name in used)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"evaluate.memories: there is no memory {unknown[0]}: choose from {', '.join(known)}")
    if mixed and (twice := next((name for name in mixed if mixed.count(name) > 1), None)):
        raise UserError(f"evaluate.memories names {twice} twice: name each memory once")
    if mixed and config.mixture.kind == "none":
        raise UserError("evaluate.memories needs a mixture that uses them: choose mixture=adaptive or another of conf/mixture")
    if not config.evaluate.all_rows:
        rows = rows[:1]
    kind = config.mixture.kind
    if not names or kind == "none":
        return rows
    if kind in NOT_FITTED:
        joined, interpolated = (names, []) if kind == "joint" else ((), [names])
        row: MixtureSpec | FittedMixtureSpec = grid_row(config, joined, interpolated)
    else:
        # A fit takes one size of each memory: the largest.
        row = FittedMixtureSpec(kind, names, tuple(config.mixture.temperatures), sizes_of(config, names)[-1:])
    return rows if row in rows else [*rows, row]


def parse_row(specification: Any, config: DictConfig) -> MixtureSpec:
    """Return the row that {joint: [names], interpolate: [[names], ...]} describes; UserError where it is invalid."""
    fields = dict(specification) if isinstance(specification, dict) else {f"{specification}": None}
    joined, interpolated = tuple(fields.pop("joint", None) or ()), []
    for names in fields.pop("interpolate", None) or ():
        interpolated.append((names,) if isinstance(names, str) else tuple(names))
    unknown = [*fields, *(name for name in (*joined, *sum(interpolated, ())) if name not in config.test_memories)]
    if unknown or len(interpolated) > 2 or not all(interpolated):
        raise UserError(
            f"evaluate.rows: {unknown or interpolated} is not understood: a row is {{joint: [...], interpolate: [[...]]}} "
            f"over the memories {', '.join(config.test_memories)}, with at most two interpolations"
        )
    return grid_row(config, joined, interpolated)


def grid_row(config: DictConfig, joined: tuple[str, ...], interpolated: list[tuple[str, ...]]) -> MixtureSpec:
    """Return the row that joins and then interpolates these memories, over the grid of ``tune``."""
    grid = config.tune
    axes = tuple(grid.interpolation_temperature), tuple(grid.interpolation_share)
    interpolations = tuple(Interpolation(names, *axes) for names in interpolated)
    temperature = tuple(grid.temperature) if joined else (1.0,)
    return MixtureSpec(joined, interpolations, temperature, sizes_of(config, (*joined, *sum(interpolated, ()))))


def sizes_of(config: DictConfig, names: Iterable[str]) -> tuple[int, ...]:
    """Return the sizes that a row's memories are tried at, as their yaml lists them; (0,) if none has any."""
    sizes = {name: tuple(plain(config.test_memories[name].sizes)) for name in names if "sizes" in config.test_memories[name]}
    # A row has one axis of sizes.
    if len({*sizes.values()}) > 1:
        raise UserError(
            f"the memories {' and '.join(sizes)} of one row are tried at different sizes: set the same test_memories.NAME.sizes"
        )
    return next(iter(sizes.values()), (0,))


def traits_of(config: DictConfig, name: str) -> type[MemoryTraits]:
    """Return the class that a memory's yaml names, or that opens it; UserError if it is no memory."""
    target = config.test_memories[name].get("_target_")
    try:
        kind = get_class(str(target))
    except Exception as error:  # Hydra raises several kinds, and imports may fail
        raise UserError(f"test_memories.{name}._target_={target} cannot be imported: {' '.join(str(error).split())}") from error
    if not issubclass(kind, MemoryTraits):
        raise UserError(f"test_memories.{name}._target_={target} is no memory: name a subclass of Memory or StoredMemory")
    return kind
