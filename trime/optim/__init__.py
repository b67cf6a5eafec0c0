"""Optimisers and schedules that torch does not have as published."""
