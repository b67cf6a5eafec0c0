"""Parallel text: sentences and their translations."""
