"""Tests of trime.layers."""
