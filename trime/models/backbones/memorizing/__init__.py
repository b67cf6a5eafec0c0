"""The Memorizing Transformer (Wu et al. 2022)."""
