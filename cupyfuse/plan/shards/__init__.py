"""Graphs over shards of one axis: what each shard computes, how partial states merge, and what finishes the results."""

from .split import Round, Shards, SplitError
from .states import merge

__all__ = ["Round", "Shards", "SplitError", "merge"]
