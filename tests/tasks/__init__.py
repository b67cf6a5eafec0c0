"""Tests of trime.tasks."""
