"""Pretrained models read with memories (Attendre section 3), one file for each family; only here transformers is needed."""
