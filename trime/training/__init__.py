"""Training tasks: the LightningModules and their losses."""
