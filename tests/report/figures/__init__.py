"""Tests of trime.report.figures."""
