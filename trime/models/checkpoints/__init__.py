"""Checkpoints released in fairseq's format."""
