"""Tests of trime.data.questions."""
