"""Tests of trime.stages."""
