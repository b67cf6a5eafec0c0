"""Stages of reading and answering over long contexts (Attendre)."""
