"""Bundles: a run as one folder, which is exported here and opened anywhere."""
