"""Rows that come again, or are in several strides in memory."""

from __future__ import annotations

from typing import NamedTuple


class Repeats(NamedTuple):
    """How rows come again: row r is row r // block * inner + r // times % inner of a matrix.

    A block of so many rows is of `inner` rows of the matrix, each `times` times in a row, in one or several rounds.

    Or how the rows of an argument of several dimensions lie in memory, if it is `in_memory`, in any order: row r is row
    r // block * apart + r // times % inner * between + r % times * within, and `times` are different rows.
    """

    block: int
    times: int
    inner: int
    apart: int = 0
    between: int = 1
    within: int = 0

    @property
    def in_memory(self) -> bool:
        return self.apart > 0
