"""`Flat`: the iterator `x.flat` over the elements of a traced array."""

from __future__ import annotations

from typing import Any

import numpy as np

from .tracer import Tracer
from .user_code import fail
from .value import LONGEST_ITERATION


class Flat:
    """The elements of an array in C order, which can be indexed and assigned to, as `numpy.flatiter`."""

    def __init__(self, array: Tracer):
        self._array, self._position = array, 0

    @property
    def coords(self) -> tuple[int, ...]:
        """The index of the next element."""
        position = min(self._position, len(self) - 1)  # at the end, of the last one
        return tuple(int(i) for i in np.unravel_index(position, self._array.shape))

    def __len__(self) -> int:
        return self._array.size

    def __iter__(self) -> Flat:
        return self

    def __next__(self) -> Any:
        if self._position >= len(self):
            raise StopIteration
        if self._position == LONGEST_ITERATION:
            fail(
                f"an iteration over {len(self)} elements",
                "each would be traced by itself; write it for the whole array",
            )
        self._position += 1
        return self[self._position - 1]

    def __getitem__(self, index: Any) -> Any:
        found = self._array.flatten()[index]
        return found.copy() if isinstance(index, slice) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign; of an array, its elements in turn: again from the first if they are fewer than those assigned to."""
        elements = self._array.flatten()
        given = elements._trace.tracer_of(value)
        if not given.size or not elements.size:
            return  # as NumPy does, whatever the shapes
        is_mask = isinstance(index, Tracer) and index._node.dtype == "bool"  # of as many elements as its values tell
        if given.size > 1 and not is_mask:
            count = index.size if isinstance(index, Tracer) else np.arange(len(self))[index].size
            value = given.flatten()
            if count != given.size:
                value = value[np.arange(count) % given.size]
        elements[index] = value
        self._array[...] = elements.reshape(self._array.shape)
