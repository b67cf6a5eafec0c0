"""Compilation of Triton kernels."""

from __future__ import annotations

import inspect
from typing import Any

import triton


def triton_jit(function: Any) -> Any:
    """Compile a function by Triton, without the wrapper of an import hook (shape checks in tests)."""
    return triton.jit(inspect.unwrap(function))
