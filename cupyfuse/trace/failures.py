"""Library steps that raise for some values of their operands, as an index out of range: a guess, on the safe side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.library import Elements, LibraryCall, Operand, public_name, resolve_function

# Functions, and methods of ufuncs, that take any values.
_TAKE_ANY = (
    *("sort", "argsort", "partition", "argpartition", "searchsorted", "concatenate"),
    *("cumsum", "cumprod", "reduce", "accumulate", "outer", "real", "imag", "view"),
)
# Those of which, as of indexing, the second argument alone decides: counts, indices, exponents of integers.
_SECOND_DECIDES = ("repeat", "reduceat", "power")


def raises_for_values(call: LibraryCall, known: Sequence[bool]) -> bool:
    """Whether a call raises for some values of its operands; `known` tells which are the same whenever it runs.

    Known values raise nothing: the call ran with them while it was traced.
    """
    name = public_name(call.function)
    last = name.rpartition(".")[2]
    if name == "power.at" or "sorter" in call.options or any(isinstance(a, Elements) for a in call.arguments):
        return True
    if call.indexes or last in _SECOND_DECIDES:
        deciding = call.arguments[1] if len(call.arguments) > 1 else call.options
        return not all(known[k] for k in _operands_in(deciding))
    return last not in _TAKE_ANY and not isinstance(resolve_function(name, np), np.ufunc)


def changes_midway(call: LibraryCall) -> bool:
    """Whether a call that raises may have changed a part of the array that it writes to.

    NumPy checks all indices before it assigns anything, but for those of `np.put`; exponents it checks one by one,
    and a power may be one in place.
    """
    return public_name(call.function) in ("put", "power", "power.at")


def _operands_in(value: Any) -> Iterator[int]:
    """Yield the numbers of the operands in nested arguments."""
    if isinstance(value, Operand):
        yield value.index
    elif isinstance(value, Elements):
        yield from (value.array.index, value.mask.index)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _operands_in(item)
