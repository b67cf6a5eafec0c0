"""The precision in which models compute, by trainer.precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig


def resolved_precision(config: DictConfig) -> str:
    """Return Lightning's name of the precision; "auto" is bf16 if the device supports it."""
    if config.trainer.precision != "auto":
        return str(config.trainer.precision)
    on_cuda = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported() else "32-true"


def autocast(device: torch.device, config: DictConfig) -> torch.autocast:
    """Return the context in which a trained model computes: bfloat16 on a CUDA device, if that is the precision."""
    enabled = device.type == "cuda" and resolved_precision(config).startswith("bf16")
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@contextmanager
def training_products(device: torch.device, precision: str) -> Iterator[None]:
    """Let a CUDA device multiply float32 matrices as TF32, of 10 bits, in a training in bfloat16 (7 bits) or half precision.

    What such a training computes in float32, above all the scores of its memory, comes from products that were rounded to
    fewer bits.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and precision.startswith(("bf16", "16")) and before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
