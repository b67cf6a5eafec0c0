"""Eviction policies (Attendre section 3.1): which entries a full memory keeps. A new policy is one file and one yaml."""
