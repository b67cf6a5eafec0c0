"""Tests of trime.mixtures."""
