"""Record a run, and replay eviction policies over it."""
