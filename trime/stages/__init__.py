"""Stages: prepare, pack, fit, encode, datastore, tune, evaluate, report; one file each."""
