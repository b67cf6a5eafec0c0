"""Campaigns of malformed settings, damaged files, kills and hostile text: ``make torture``; ``make test`` runs a sample."""
