"""The workflow engine: command line, stages in order, artefacts, engines, storage of runs."""
