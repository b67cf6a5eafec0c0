"""Tests of trime.data."""
