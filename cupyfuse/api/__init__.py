"""The NumPy frontend: from the caller's arrays to a plan that runs, and back."""
