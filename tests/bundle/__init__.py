"""Tests of trime.bundle."""
