"""Tests of trime.kv.eviction."""
