"""Plans: the artefacts of an experiment, each linked to those it is made from."""
