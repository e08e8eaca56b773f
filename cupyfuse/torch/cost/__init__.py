"""The cost model: the time of a chain fused, and left to PyTorch."""
