"""Settings that make a CPU fast: the library of matrix products, and memory that is reused between steps."""

from __future__ import annotations

import ctypes
import sys

import torch

PROBE_SHAPES = ((512, 256, 512), (64, 1024, 96), (33, 65, 17))  # of products that are tried: rows, terms of a sum, columns
MAX_ERROR = 2e-6  # relative error of float32 sums of as many terms; bfloat16's is 3e-3
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from malloc.h
TRIM_BYTES = 2**29  # bytes of free memory that glibc may keep at the end of its heap


def prepare_cpu() -> None:
    """Set up a process that computes on the CPU; may be called repeatedly."""
    select_matmul()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:  # glibc keeps freed memory; otherwise each large tensor needs new pages, which the system fills with zeros
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)


def multiplies_in_bfloat16() -> bool:
    """Return whether this processor has instructions that multiply matrices in bfloat16, twice as fast as in float32."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)


def select_matmul() -> None:
    """Let oneDNN multiply float32 matrices instead of MKL, which is 2 to 4 times slower on AMD processors.

    PyTorch does so at precision "medium", which allows bfloat16. oneDNN uses bfloat16 only on processors with AMX; there,
    detected by a comparison with products in float64, the setting is left as it was.
    """
    if not torch.backends.mkldnn.is_available():
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if max(matmul_error(*shape) for shape in PROBE_SHAPES) > MAX_ERROR:
        torch.set_float32_matmul_precision(before)


def matmul_error(rows: int, terms: int, columns: int) -> float:
    """Return the relative error of a product of random matrices in float32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, terms, generator=generator, dtype=torch.float64)
    b = torch.randn(terms, columns, generator=generator, dtype=torch.float64)
    exact = a @ b
    return float((a.float() @ b.float() - exact).norm() / exact.norm())
