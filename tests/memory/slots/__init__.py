"""Tests of trime.memory.slots."""
