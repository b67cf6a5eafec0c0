"""Mixtures: how the vocabulary's evidence and the memories' become one probability."""
