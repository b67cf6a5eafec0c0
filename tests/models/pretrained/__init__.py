"""Tests of trime.models.pretrained."""
