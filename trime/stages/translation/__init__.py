"""Stages of translation."""
