"""Stages: prepare, pack, fit, encode, datastore, tune, evaluate; one file each. The stage report is run/reporting.py."""
