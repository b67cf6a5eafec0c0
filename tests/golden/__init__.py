"""Numbers computed with the published code: those in vectors/, or a fuller set that TRIME_GOLDEN names."""
