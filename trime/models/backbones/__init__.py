"""Backbones: from embedded tokens to (f, g)."""
