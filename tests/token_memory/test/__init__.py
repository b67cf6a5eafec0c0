"""Tests of trime.token_memory.test."""
