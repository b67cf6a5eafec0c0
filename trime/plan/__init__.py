"""Which artefacts an experiment is made of, and what each is made from."""
