"""Memories that are searched while text is scored: local, long, external, n-grams."""
