"""Tests of trime.common."""
