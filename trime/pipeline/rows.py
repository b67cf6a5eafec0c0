"""The rows of an experiment: those of the papers as conf/experiment states them, and beneath them that of ``mixture=``."""

from __future__ import annotations

from omegaconf import DictConfig

from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Interpolation, Row, rows_from_config
from trime.evaluation.scorer import memory_names
from trime.io import plain
from trime.types import UserError

FITTED = ("calibrated", "adaptive")


def rows_of(config: DictConfig) -> list[Row | FittedRow]:
    """Return every row, over the grid of tune where it has one; a fitted mixture is not fitted yet."""
    known = tuple(config.memories)
    rows: list[Row | FittedRow] = [*rows_from_config(plain(config.evaluate.rows), config.tune, known)]
    named = memory_names(rows)
    wanted = plain(config.evaluate.memories)
    names = tuple(wanted) if wanted is not None else tuple(name for name in known if name in named)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"evaluate.memories: there is no memory {unknown[0]}: choose from {', '.join(known)}")
    if wanted and (twice := next((name for name in wanted if wanted.count(name) > 1), None)):
        raise UserError(f"evaluate.memories names {twice} twice: name each memory once")
    if wanted and config.mixture.kind == "none":
        raise UserError("evaluate.memories is what mixture= mixes: choose mixture=adaptive, calibrated, joint or interpolated")
    if not config.evaluate.papers:
        rows = rows[:1]
    if not names or config.mixture.kind == "none":
        return rows
    own = mixture_row(config, names)
    return rows if own in rows else [*rows, own]


def mixture_row(config: DictConfig, names: tuple[str, ...]) -> Row | FittedRow:
    """Return the row that mixes these memories."""
    kind, grid = config.mixture.kind, config.tune
    sizes = tuple(grid.memory_size) if "long" in names else (0,)
    if kind in FITTED:
        online = bool(config.mixture.model.get("online"))
        return FittedRow(kind, names, tuple(config.mixture.temperatures), sizes[-1:], online=online)
    if kind == "joint":
        return Row(names, (), tuple(grid.temperature), sizes)
    return Row((), (Interpolation(names, tuple(grid.interpolation_temperature), tuple(grid.interpolation_share)),), sizes=sizes)


def memories_of(config: DictConfig) -> set[str]:
    """Return the memories that some row names."""
    return memory_names(rows_of(config))
