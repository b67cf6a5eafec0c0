"""Tests of trime.models.layers."""
