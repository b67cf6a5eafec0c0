"""Tests of trime.stages.samples."""
