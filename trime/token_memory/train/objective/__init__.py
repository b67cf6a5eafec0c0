"""Masses of many entries and their gradients: a plain definition, and kernels that compute the same."""
