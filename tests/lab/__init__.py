"""Tests of trime.lab."""
