"""From text to batches: documents, their symbols, ids on disk, segments, the order of segments, tensors.

The walk: ``datasets/NAME.py`` → ``tokenizers.py`` → ``corpus.py`` → ``segments.py`` → ``batching/policies.py`` → ``module.py``.
"""
