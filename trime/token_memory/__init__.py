"""TRIME's memories of contexts and the tokens that followed: in training, at test, and their search."""
