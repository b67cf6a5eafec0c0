"""Memories of a fixed number of entries, and the policies that evict from them."""
