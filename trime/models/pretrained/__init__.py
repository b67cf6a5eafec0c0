"""Pretrained models read with memories (Attendre section 3): one file a family; transformers is needed here alone."""
