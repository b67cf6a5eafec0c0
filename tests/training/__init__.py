"""Tests of trime.training."""
