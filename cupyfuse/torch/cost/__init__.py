"""The cost model: the time of a chain through this library, and without it."""
