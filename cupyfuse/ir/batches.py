"""Batches of matrix products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """The batches of a product: `count` products of (rows, depth) by (depth, cols).

    Attributes
    ----------
    transposed : for each operand whether its matrices lie transposed in memory
    shared : for each operand whether there is one matrix for all batches
    """

    count: int
    rows: int
    depth: int
    cols: int
    transposed: tuple[bool, bool]
    shared: tuple[bool, bool]

    def operand(self, which: int) -> tuple[int, int, int]:
        """Return the number of matrices of an operand, and their shape in memory."""
        shape = (self.rows, self.depth) if which == 0 else (self.depth, self.cols)
        return 1 if self.shared[which] else self.count, *(shape[::-1] if self.transposed[which] else shape)
