"""Looking into a run: audit, generation, samples, ledger."""
