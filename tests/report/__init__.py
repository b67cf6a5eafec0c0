"""Tests of trime.report."""
