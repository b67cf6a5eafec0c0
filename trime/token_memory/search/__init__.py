"""Nearest-neighbour search in a datastore: exact, inverted files, FAISS, and parts on one or several machines."""
