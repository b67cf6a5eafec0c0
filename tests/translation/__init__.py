"""Tests of trime.translation."""
