"""Perplexity, bits per character or byte, peak memory and elapsed time."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, TypeVar

import numpy as np

Loss = TypeVar("Loss", float, np.ndarray)
LARGEST_LOSS = 700.0  # nats; the exponential of 710 is no float


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token."""
    return math.exp(min(loss, LARGEST_LOSS))


def perplexities(losses: np.ndarray) -> np.ndarray:
    """Return the perplexity of each of an array of mean losses in nats per token."""
    return np.exp(np.minimum(losses, LARGEST_LOSS))


def bits(loss: Loss) -> Loss:
    """Convert nats to bits: bits per character or byte where tokens are such."""
    return loss / math.log(2)


# From a mean loss per token, by unit.
MEASURES: dict[str, Callable[[float], float]] = {"perplexity": perplexity, "bits/char": bits, "bits/byte": bits}
ARRAY_MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "perplexity": perplexities,
    "bits/char": bits,
    "bits/byte": bits,
}


def mean_over_seeds(results: Iterable[float], metric: str) -> float:
    """Return the mean of results in a metric; of perplexities the geometric one, which is the perplexity of the mean loss.

    Differences and their intervals are those of mean losses, too.
    """
    return (geometric_mean if metric == "perplexity" else mean)(results)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of ``count`` independent cases, such as correctly answered questions."""
    z = 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def processor_seconds() -> float:
    """Return the processor time of all threads of this process, and of its child processes that have ended.

    Unlike elapsed time, it does not grow when other programs use the machine.
    """
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def device_seconds() -> float:
    """Return the time in seconds, after all work queued on the device is done: it computes on after a call returns."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class ResourceUsage:
    """Elapsed and processor seconds, and peak memory (of the GPU if there is one, or of the process), since construction."""

    def __init__(self) -> None:
        import torch  # here, because tables of results need none, and it takes seconds

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_process_peak()  # slow when a lot of memory has just been freed
        self.start, self.processor_start = time.perf_counter(), processor_seconds()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def peak_memory_mb(self) -> float:
        import torch

        if torch.cuda.is_available():
            return round(torch.cuda.max_memory_allocated() / 2**20, 1)
        return round(process_peak() / 2**20, 1)

    def note(self) -> dict[str, Any]:
        """Return elapsed and processor seconds and peak memory, to be kept beside a result."""
        processor = processor_seconds() - self.processor_start
        return {"seconds": self.seconds, "processor_seconds": processor, "peak_memory_mb": self.peak_memory_mb}


class Usage:
    """Seconds and peak memory of work in shards, from the notes of the shards.

    Earlier versions noted no processor time: it is None if a part lacks it.
    """

    def __init__(self) -> None:
        self.seconds = self.peak_memory_mb = 0.0
        self.processor_seconds: float | None = 0.0

    def add(self, note: Mapping[str, Any]) -> None:
        """Add the seconds of a part, and its peak if it is the largest so far."""
        self.seconds += note["seconds"]
        of_part = note.get("processor_seconds")
        if self.processor_seconds is not None:
            self.processor_seconds = None if of_part is None else self.processor_seconds + of_part
        self.peak_memory_mb = max(self.peak_memory_mb, note["peak_memory_mb"])


def processor_ms(seconds: float | None, tokens: int) -> dict[str, float]:
    """Return the processor time in ms per token as a field of results; none if it is not known."""
    return {} if seconds is None or not tokens else {"processor_ms_per_token": round(1e3 * seconds / tokens, 5)}


def reset_process_peak() -> None:
    """Reset the peak resident size on Linux; elsewhere it remains the peak since the process started.

    Freed memory that the allocator keeps (see cpu.prepare_cpu) is returned first, so that it does not count.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:
        trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_peak() -> int:
    """Return the peak resident size in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
