"""From a window of text to the log-masses of memories, to mixtures, to rows of a table."""
