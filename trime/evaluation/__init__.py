"""Scoring, attribution and generation with memories."""
