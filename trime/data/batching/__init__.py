"""Batchings: which segments share a batch (TRIME section 4). One file and one yaml add one."""

from trime.data.batching.base import Batching

__all__ = ["Batching"]
