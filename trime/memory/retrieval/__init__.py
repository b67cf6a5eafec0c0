"""Nearest neighbours in a datastore: exact, inverted files, FAISS, and shards on one or several machines."""
