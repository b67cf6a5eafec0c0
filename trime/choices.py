"""The words that settings choose from, for the schema of the configuration and for the code that they are settings of."""

METRICS = ("ip", "l2", "cosine")  # of similarity
DTYPES = ("float16", "bfloat16", "float32")
INTERPOLATED = ("datastore", "all")  # the memories of Eq. 8's P_kNN
ANALYZERS = ("raw", "english")  # of terms for BM25
EXCLUDED = ("none", "document", "near_copies")  # neighbours that a segment does not get
EXTENSIONS = ("lm_infinite", "interpolation", "ntk", "yarn", "none")  # of a pretrained model's positions beyond those it knows
CACHED_KEYS = ("before_rope", "after_rope")  # rotary position embedding
