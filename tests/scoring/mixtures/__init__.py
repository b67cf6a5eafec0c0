"""Tests of trime.scoring.mixtures."""
