"""Tests of trime.kernels."""
