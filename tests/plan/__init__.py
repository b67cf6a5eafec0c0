"""Tests of trime.plan."""
