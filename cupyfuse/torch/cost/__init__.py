"""The cost model: what a chain takes through this library, and what it takes without."""
