"""Tests of trime.stages.translation."""
