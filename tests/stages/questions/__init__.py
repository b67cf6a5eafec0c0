"""Tests of trime.stages.questions."""
