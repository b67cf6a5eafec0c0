"""The foundation of all stages: artefacts, processes, model folders, training."""
