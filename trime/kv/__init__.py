"""A memory of keys and values inside a decoder: what it keeps, what it evicts, and what queries get back."""
