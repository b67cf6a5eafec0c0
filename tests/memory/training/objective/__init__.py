"""Tests of trime.memory.training.objective."""
