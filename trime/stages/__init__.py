"""Stages: prepare, pack, fit, encode, index, tune, evaluate; one file each. The stage report is run/reporting.py."""
