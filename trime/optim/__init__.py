"""Optimisers and learning-rate schedules as published, where torch has them otherwise or not at all."""
