"""Tests of trime.memory."""
