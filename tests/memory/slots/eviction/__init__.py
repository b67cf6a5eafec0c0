"""Tests of trime.memory.slots.eviction."""
