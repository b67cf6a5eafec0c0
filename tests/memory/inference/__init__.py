"""Tests of trime.memory.inference."""
