"""The arrays of `out=`: imported and checked before anything is computed or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .. import dtypes
from . import arrays


class Result(Protocol):
    """What a target receives: an array, or the output of a plan."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def import_targets(results: Sequence[Result], argument: Any, out: Any) -> list[Any]:
    """Import the arrays of `out`, and check them against the results and the device of an argument."""
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(results):
        raise ValueError(f"out: expected {len(results)} array(s), one for each result, got {len(given)}")
    targets: list[Any] = []
    for position, (array, result) in enumerate(zip(given, results, strict=True)):
        name = "out" if len(given) == 1 else f"out[{position}]"
        target = array
        if type(array) is not type(argument):
            if not arrays.is_array(array) or isinstance(array, arrays.Spec):
                raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
            target = arrays.import_array(array, name).array
        if arrays.place_of(target) != arrays.place_of(argument):
            raise TypeError(f"{name}: expected an array in the same memory as the arguments; allocate it beside them")
        try:
            dtype = dtypes.name_of(target.dtype)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        expected = dtypes.name_of(result.dtype)
        if target.shape != result.shape or dtype != expected:
            raise ValueError(
                f"{name}: expected shape {result.shape} and dtype {expected}, got shape {tuple(target.shape)} and "
                f"dtype {dtype}"
            )
        flags = target.flags
        if isinstance(target, np.ndarray) and not flags.writeable:
            raise ValueError(f"{name}: the array is read-only")
        if not flags.c_contiguous and target.size and _repeats_elements(target):
            raise ValueError(f"{name}: several elements of the array share one address; pass a plain array")
        for earlier, other in enumerate(targets):
            if arrays.share_memory(target, other):
                raise ValueError(f"{name}: shares memory with out[{earlier}]; pass an array of its own for each result")
        targets.append(target)
    return targets


def _repeats_elements(array: Any) -> bool:
    """Whether several elements of an array share one address."""
    return any(n > 1 and stride == 0 for n, stride in zip(array.shape, array.strides, strict=True))
