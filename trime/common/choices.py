"""The words that settings choose from, for the schema of the configuration and for the code that they are settings of."""

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
Order = Literal["first", "last", "both"]  # where a question stands: before its context, after it, or both
ORDERS = get_args(Order)
Counted = Literal["exact_match", "contained"]  # by which measure an answer counts
ASKED = ("one", "all")  # of the keys that a text hides
