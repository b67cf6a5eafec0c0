"""Mixtures: how the evidence of the vocabulary and of memories becomes one probability."""
