"""Shared types, errors, checks, files, units, progress and kernels' tools."""
