"""Shapes of batched matrix products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """A batched product: `count` products of (rows, depth) by (depth, cols) matrices.

    Attributes
    ----------
    transposed : whether each operand's matrices are stored transposed
    shared : whether each operand is one matrix for all batches
    """

    count: int
    rows: int
    depth: int
    cols: int
    transposed: tuple[bool, bool]
    shared: tuple[bool, bool]

    def stored_shape(self, which: int) -> tuple[int, int, int]:
        """Return the number of matrices of the left (0) or right (1) operand, and their rows and columns as stored."""
        shape = (self.rows, self.depth) if which == 0 else (self.depth, self.cols)
        return 1 if self.shared[which] else self.count, *(shape[::-1] if self.transposed[which] else shape)
