"""Checks of the arguments of library functions; each raises a UserError that names the argument."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch

from trime.errors import UserError

SHAPES = ("a single number", "one-dimensional", "two-dimensional", "three-dimensional")


def check_number(
    name: str,
    value: Any,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
) -> None:
    """Raise UserError unless ``value`` is a finite number within the bounds; true and false are no numbers."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    kind_fits = is_number and (not whole or (value == int(value) and not isinstance(value, float)))
    low_fits = kind_fits and (at_least is None or value >= at_least) and (above is None or value > above)
    if not (low_fits and (at_most is None or value <= at_most)):
        bounds = (("at least", at_least), ("above", above), ("at most", at_most))
        limits = " and ".join(f"{word} {limit:g}" for word, limit in bounds if limit is not None)
        raise UserError(f"{name}={short_repr(value)}: it must be a {'whole ' * whole}number{' ' * bool(limits)}{limits}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise UserError unless ``value`` is one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        raise UserError(f"{name}={short_repr(value)}: choose one of {', '.join(choices)}")


def check_object(name: str, value: Any, kind: Any, example: str) -> None:
    """Raise UserError unless ``value`` is an object of a class or protocol, as ``example`` is; a class is none."""
    if isinstance(value, type) or not isinstance(value, kind):
        raise UserError(f"{name}={short_repr(value)}: pass an object, such as {example}")


def check_floats(name: str, value: Any, axes: int) -> None:
    """Raise UserError unless ``value`` is a floating-point tensor with ``axes`` axes; only the first may be empty."""
    check_tensor(name, value, axes)
    if not value.is_floating_point():
        raise UserError(f"{name} is of {value.dtype}: it must hold floating-point numbers")
    if axes and not all(value.shape[1:]):
        raise UserError(f"{name} has shape {[*value.shape]}: no axis but the first may be empty")


def check_whole_numbers(name: str, value: Any, axes: int) -> None:
    """Raise UserError unless ``value`` is a tensor of whole numbers with ``axes`` axes."""
    check_tensor(name, value, axes)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise UserError(f"{name} is of {value.dtype}: it must hold whole numbers, such as torch.long")


def check_tensor(name: str, value: Any, axes: int) -> None:
    """Raise UserError unless ``value`` is a tensor with ``axes`` axes."""
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{name} is of type {type(value).__name__}: it must be a tensor")
    if value.layout != torch.strided:
        raise UserError(f"{name} is a sparse tensor: pass {name}.to_dense()")
    if value.ndim != axes:
        raise UserError(f"{name} has shape {[*value.shape]}: it must be {SHAPES[axes]}")


def check_device(**tensors: torch.Tensor) -> None:
    """Raise UserError unless all tensors are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise UserError(f"{places}: move them to one device")


def check_broadcast(**tensors: torch.Tensor) -> None:
    """Raise UserError unless all tensors are of floats, on one device, and their shapes broadcast; on the CPU also for NaN."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise UserError(f"{name}={short_repr(tensor)}: it must be a tensor of floating-point numbers")
        if not tensor.is_cuda and tensor.isnan().any():  # a GPU would be waited for, in each update
            raise UserError(f"{name} holds NaN: see what computed it")
    check_device(**tensors)
    try:
        torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {[*tensor.shape]}" for name, tensor in tensors.items())
        raise UserError(f"{shapes}: these shapes do not broadcast") from None


def check_in_vocabulary(name: str, tokens: torch.Tensor, vocabulary: int) -> None:
    """Raise UserError unless all tokens are numbers from 0 to below the size of the vocabulary."""
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise UserError(f"{name} has token {int(outside[0])}, but the logits are of tokens 0 to {vocabulary - 1}")


def short_repr(value: Any) -> str:
    """Return a value for a message: a tensor by its shape, anything else as Python writes it, shortened to one line."""
    text = f"tensor of shape {[*value.shape]}" if isinstance(value, torch.Tensor) else repr(value)
    return " ".join(text.split())[:80]
