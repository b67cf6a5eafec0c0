"""Tests of trime.pipeline."""
