"""Analyses of an evaluated run."""
