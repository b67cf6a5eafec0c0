"""Engines: how the parts of an artefact that do not depend on one another are made (conf/engine)."""
