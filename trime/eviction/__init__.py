"""Eviction policies (Attendre section 3.1): which entries a full memory keeps. One file and one yaml add one."""
