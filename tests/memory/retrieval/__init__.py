"""Tests of trime.memory.retrieval."""
