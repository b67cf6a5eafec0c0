"""Measures: perplexity, bits, peak memory, elapsed time."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats a token."""
    return math.exp(min(loss, 700.0))


def bits(loss: float) -> float:
    """Nats to bits: bits per character where tokens are characters."""
    return loss / math.log(2)


MEASURES = {"perplexity": perplexity, "bits/char": bits}  # of a mean loss, by the name of the unit


class ResourceUsage:
    """Seconds and peak memory from here on: of the device where there is one, else of the process."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_process_peak()  # which may take long after something large
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def peak_memory_mb(self) -> float:
        if torch.cuda.is_available():
            return round(torch.cuda.max_memory_allocated() / 2**20, 1)
        return round(process_peak() / 2**20, 1)


def reset_process_peak() -> None:
    """Linux forgets the peak resident size when told so; elsewhere it stays the whole process's.

    What was freed before and is kept (see cpu.keep_memory) is given back first: it is nobody's need.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:
        trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_peak() -> int:
    """Peak resident bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
