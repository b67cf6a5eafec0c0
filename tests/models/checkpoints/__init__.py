"""Tests of trime.models.checkpoints."""
