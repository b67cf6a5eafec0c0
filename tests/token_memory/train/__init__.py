"""Tests of trime.token_memory.train."""
