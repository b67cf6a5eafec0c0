"""Tests of trime.memory.training."""
