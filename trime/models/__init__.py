"""Backbones, embeddings and output heads."""
