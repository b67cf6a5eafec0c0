"""Tests of trime.eviction."""
