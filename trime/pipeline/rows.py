"""The rows of an experiment's table: those of the papers, as conf/experiment lists them, then that of ``mixture=``."""

from __future__ import annotations

from omegaconf import DictConfig

from trime.errors import UserError
from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec
from trime.evaluation.mixture_spec import Interpolation, MixtureSpec, rows_from_config
from trime.evaluation.scorer import memory_names
from trime.io import plain

NOT_FITTED = ("none", "joint", "interpolated")  # kinds of mixture without a model to fit
MixtureSpecs = list[MixtureSpec | FittedMixtureSpec]  # the rows of an experiment


def rows_of(config: DictConfig) -> MixtureSpecs:
    """Return all rows, those with a grid over the grid of ``tune``; a fitted mixture is not fitted yet.

    UserError if evaluate.memories names an unknown memory, names one twice, or is set without a mixture.
    """
    known = tuple(config.test_memories)
    rows: MixtureSpecs = [*rows_from_config(plain(config.evaluate.rows), config.tune, known)]
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
    if not names or config.mixture.kind == "none":
        return rows
    row = mixture_row(config, names)
    return rows if row in rows else [*rows, row]


def mixture_row(config: DictConfig, names: tuple[str, ...]) -> MixtureSpec | FittedMixtureSpec:
    """Return the row that mixes these memories as ``mixture=`` says."""
    kind, grid = config.mixture.kind, config.tune
    sizes = tuple(grid.memory_size) if "long" in names else (0,)
    if kind not in NOT_FITTED:
        online = bool(config.mixture.model.get("online"))
        return FittedMixtureSpec(kind, names, tuple(config.mixture.temperatures), sizes[-1:], online=online)
    if kind == "joint":
        return MixtureSpec(names, (), tuple(grid.temperature), sizes)
    return MixtureSpec(
        (), (Interpolation(names, tuple(grid.interpolation_temperature), tuple(grid.interpolation_share)),), sizes=sizes
    )


def memories_of(config: DictConfig) -> set[str]:
    """Return the names of the memories that any row uses."""
    return memory_names(rows_of(config))
