"""Kernels on the CPU: numba, matrix products, memory."""
