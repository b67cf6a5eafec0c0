"""Fast computation on the CPU: numba kernels, the library of matrix products, and the reuse of memory."""
