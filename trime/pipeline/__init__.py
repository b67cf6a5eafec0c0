"""What every stage stands on: artefacts, processes, model folders, the trainer."""
