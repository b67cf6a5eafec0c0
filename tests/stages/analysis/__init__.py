"""Tests of trime.stages.analysis."""
