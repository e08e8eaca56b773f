"""The Dask frontend: fused functions on Dask arrays stay lazy, and run chunk by chunk.

Nothing is called here by hand: a fused function, a bound one and the public functions take Dask arrays.
See docs/dask.md.
"""

from .call import call

__all__ = ["call"]
