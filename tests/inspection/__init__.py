"""Tests of trime.inspection."""
