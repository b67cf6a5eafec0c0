"""Batching policies: which segments share a batch (TRIME section 4). One file and one yaml add a policy."""

from trime.data.batching.policies import Batching

__all__ = ["Batching"]
