"""Nearest-neighbour search in a datastore: exact, inverted files, FAISS, and slices on one or several machines."""
