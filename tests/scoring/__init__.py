"""Tests of trime.scoring."""
