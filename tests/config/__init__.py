"""Tests of trime.config."""
