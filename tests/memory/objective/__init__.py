"""Tests of trime.memory.objective."""
