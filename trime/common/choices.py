"""Words and numbers of settings, for the schema and for the code that they are settings of; durations of messages."""

from __future__ import annotations

from typing import Literal, get_args

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")  # read when torch is imported

Metric = Literal["ip", "l2", "cosine"]  # of similarity
METRICS = get_args(Metric)
Dtype = Literal["float16", "bfloat16", "float32"]
Extension = Literal["lm_infinite", "interpolation", "ntk", "yarn", "none"]  # of positions beyond those a pretrained model knows
EXTENSIONS = get_args(Extension)
TopKSearch = Literal["exact", "buckets"]  # of the entries that a query of a pretrained model attends to
CachedKeys = Literal["before_rope", "after_rope"]  # rotary position embedding
CACHED_KEYS = get_args(CachedKeys)
Order = Literal["first", "last", "both"]  # where a question is: before its context, after it, or both
ORDERS = get_args(Order)
Counted = Literal["exact_match", "contained"]  # by which measure an answer counts
ASKED = ("one", "all")  # of the keys that a text hides


SCALES = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def duration(seconds: float) -> str:
    """Return a duration as a person would say it, in seconds, minutes, hours or days."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def parse_quantity(value: int | float | str) -> int:
    """Return a number of at least 1, with k, M, G or B behind it or without; ValueError where it is none."""
    text = str(value)
    digits, scale = (text[:-1], SCALES[text[-1]]) if text[-1:] in SCALES else (text, 1)
    try:
        count = int(float(digits) * scale)
    except OverflowError:
        count = 0
    if count < 1:
        raise ValueError(f"{value} is not at least 1")
    return count
