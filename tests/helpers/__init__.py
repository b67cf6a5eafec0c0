"""What several tests use: texts, models, stores, and the laws written out."""
