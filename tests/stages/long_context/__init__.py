"""Tests of trime.stages.long_context."""
