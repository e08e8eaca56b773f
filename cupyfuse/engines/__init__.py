"""Engines run plans: with NumPy, or with kernels on a GPU."""
