"""Mixtures: how the masses of the vocabulary and of memories become one probability."""
