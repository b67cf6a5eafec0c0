"""Tests of trime.run."""
