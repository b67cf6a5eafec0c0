"""Running an experiment: checks, stages in order, results and their report."""
