"""Stages that train small models and answer questions over long contexts (Attendre)."""
