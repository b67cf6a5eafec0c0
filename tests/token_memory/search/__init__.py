"""Tests of trime.token_memory.search."""
