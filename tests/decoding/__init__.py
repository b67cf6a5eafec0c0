"""Tests of trime.decoding."""
