"""Memories in training: which contexts of a batch a query sees, and the objective over them."""
