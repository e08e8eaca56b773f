"""Parameters of emitted kernels: arrays and numbers, and how far an array extends over rows and columns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..ir.graph import Node

# Extents: one value per element, per row, per column, or one in all; values of ANY extent are read with both strides.
FULL, ROW, COLUMN, SCALAR, ANY = "full", "row", "column", "scalar", "any"
# What follows an array's name in the names of what a kernel may take with it: strides, and how rows come again.
STRIDES, DIVISORS, STEPS = ("rows", "cols"), ("block", "times", "inner"), ("apart", "between", "within")


@dataclass(frozen=True)
class Parameter:
    """An array or number that a kernel takes.

    An array is passed as a pointer, then its row stride in elements (extents FULL, ROW and ANY), then its column stride
    (ANY), then how its rows come again, if they do (`ir/repeats.py`); a number as one double. `alike` is the
    name of an earlier array whose rows come again as its own do, if there is one: the kernel finds a row of both at
    once, and is told how only once.
    """

    name: str
    node: Node
    extent: str
    dtype: str
    written: bool
    alike: str = ""

    @property
    def is_number(self) -> bool:
        return self.node.op == "const"

    @property
    def has_rows(self) -> bool:
        """Whether the kernel takes a row stride."""
        return self.extent in (FULL, ROW, ANY) and not self.is_number

    @property
    def has_cols(self) -> bool:
        """Whether the kernel takes a column stride."""
        return self.extent == ANY and not self.is_number

    @property
    def repeats(self) -> bool:
        """Whether rows come again, so that the kernel finds a row by its index."""
        return self.node.op == "repeat" and self.has_rows

    @property
    def has_repeats(self) -> bool:
        """Whether the kernel takes how rows come again."""
        return self.repeats and not self.alike

    def row(self, row: str) -> str:
        """Return the expression of the row in memory that is a row of the step's."""
        name = self.alike or self.name
        numbers = ", ".join(f"{name}_{each}" for each in (*DIVISORS, *STEPS))
        return f"repeated_row({row}, {numbers})" if self.repeats else row

    @property
    def swapped(self) -> bool:
        """Whether the columns of each pair change places: those of a pack are loaded, and then swapped."""
        node = self.node.inputs[0] if self.node.op == "repeat" else self.node
        return node.op == "swap"

    def col(self, col: str) -> str:
        """Return the expression of the column in memory that is a column of the step's."""
        return f"({col} ^ 1)" if self.swapped else col

    def pack_address(self, vec: str = "V") -> str:
        """Return the address of the pack of so many elements at (row, col) of a full or per-column array.

        Of a pair that changes places one element alone is where the other one is.
        """
        col = f"({vec} == 1 ? {self.col('col')} : col)" if self.swapped else "col"
        if self.extent == COLUMN:
            return f"{self.name} + {col}"
        return f"{self.name} + {self.row('row')} * {self.name}_rows + {col}"

    def pack(self, loaded: str) -> str:
        """Return the expression of a pack of the step's elements, given that of the pack in memory."""
        return f"swap_pairs({loaded})" if self.swapped else loaded


def input_name(node: Node, base: Node) -> str:
    """Name a parameter after the user's argument, with a prefix that no other emitted name has."""
    name = node.name or base.name or base.op
    suffix = "" if base is node else "_T" if node.op == "transpose" else "_view"
    return "in_" + re.sub(r"\W", "_", name, flags=re.ASCII) + suffix
