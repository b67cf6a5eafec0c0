"""What makes a CPU fast: matrix products by the library that suits it, and memory that is kept between two steps."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trime.types import Float, Tensor

SHAPES = ((512, 256, 512), (64, 1024, 96), (33, 65, 17))  # rows, terms of a sum, columns
EXACT = 2e-6  # relative, of float32 sums of so many terms; bfloat16's is 3e-3
SHORT = 256  # keys up to which attention as whole matrices is faster where oneDNN multiplies; their memory grows with L^2
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt, from malloc.h
KEPT = 2**29  # bytes at most that glibc keeps at the end of its heap


def prepare_cpu() -> None:
    """For a process that computes on the CPU, once or more."""
    choose_products()
    keep_memory()


def choose_products() -> None:
    """Lets oneDNN multiply float32 matrices instead of MKL, which is 2 to 4 times slower on processors of AMD.

    PyTorch does so at precision "medium", which allows bfloat16. oneDNN makes use of that only on processors with AMX;
    there, as a product in float64 tells, nothing changes.
    """
    if not torch.backends.mkldnn.is_available():
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if max(error(*shape) for shape in SHAPES) > EXACT:
        torch.set_float32_matmul_precision(before)


def error(rows: int, terms: int, columns: int) -> float:
    """The relative error of a product in float32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, terms, generator=generator, dtype=torch.float64)
    b = torch.randn(terms, columns, generator=generator, dtype=torch.float64)
    exact = a @ b
    return float((a.float() @ b.float() - exact).norm() / exact.norm())


def keep_memory() -> None:
    """Has glibc keep what was freed: else every large tensor is new pages, which the system fills with zeros first."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust:
        adjust(MMAP_MAX, 0)
        adjust(TRIM_THRESHOLD, KEPT)


def attend(
    query: Float[Tensor, "... l e"],
    key: Float[Tensor, "... m e"],
    value: Float[Tensor, "... m e"],
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "... l e"]:
    """PyTorch's softmax(q k^T / sqrt(e)) v, in the form that is faster here."""
    whole = query.device.type == "cpu" and key.shape[-2] <= SHORT and torch.get_float32_matmul_precision() == "medium"
    with sdpa_kernel(SDPBackend.MATH) if whole else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal, scale=scale)
