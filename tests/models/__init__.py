"""Tests of trime.models."""
