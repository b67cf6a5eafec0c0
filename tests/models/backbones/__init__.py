"""Tests of trime.models.backbones."""
