"""Text from a model: sampling, beam search, and the memories behind each token."""
