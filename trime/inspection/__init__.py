"""Inspection of runs: audit, generation, samples, and the ledger of published results."""
