"""NumPy's types of numbers where code calls them, as in `np.float32(x.sum())`: they convert traced arrays, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from ... import dtypes
from ..library import holds_tracers
from ..masked import Masked
from ..number import TracedNumber
from ..python_numbers import as_integer, in_dtype_or_raise
from ..tracer import Tracer


def _converter(original: type[np.generic]) -> Callable[..., Any]:
    """Return what stands for a type of numbers where it is called.

    It converts traced arrays, lists of them, and numbers that each call brings.
    """

    @wraps(original, updated=())
    def call(*args: Any, **options: Any) -> Any:
        (value,) = args if len(args) == 1 and not options else (None,)
        if type(value) is Tracer and not value.ndim:
            # NumPy refuses Python's complex numbers, and takes the real part of its own.
            is_complex = isinstance(value, complex) and value._is_python
            takes = not is_complex or issubclass(original, np.complexfloating)
            return _scalar_of(value, original) if takes else original(value)
        if isinstance(value, (Masked, Tracer)) or (isinstance(value, (list, tuple)) and holds_tracers(value)):
            return np.asarray(value, original)
        if isinstance(value, TracedNumber):
            found = value.of_function(original, [value])
            return original(value) if found is None else found
        return original(*args, **options)

    return call


def _scalar_of(value: Tracer, cls: type[np.generic]) -> Any:
    """Return a traced scalar or 0-d array as a scalar of a type; integers have to hold a number of Python's."""
    name = dtypes.name_of(np.dtype(cls))
    if value._is_python and issubclass(cls, np.integer):
        return in_dtype_or_raise(as_integer(value), name)._as_result()
    return value.astype(cls)._as_result()


def _is_supported(value: Any) -> bool:
    """Whether a value is the type of the scalars of a dtype that is traced: not `np.floating`, nor `np.longlong`."""
    if not isinstance(value, type) or not issubclass(value, np.generic):
        return False
    try:
        name = dtypes.name_of(np.dtype(value))
    except TypeError:
        return False
    return bool(dtypes.to_numpy(name).type is value)


# By the names that they have in NumPy, some several.
SCALAR_TYPES: dict[str, type] = {name: value for name, value in vars(np).items() if _is_supported(value)}
SCALAR_CONVERTERS = {cls: _converter(cls) for cls in {*SCALAR_TYPES.values()}}
REPLACED_SCALAR_TYPES = {name: SCALAR_CONVERTERS[cls] for name, cls in SCALAR_TYPES.items()}
