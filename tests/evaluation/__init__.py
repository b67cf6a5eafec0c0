"""Tests of trime.evaluation."""
