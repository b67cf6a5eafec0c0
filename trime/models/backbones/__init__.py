"""Backbones, which encode tokens as (f, g)."""
