"""Native forms of NumPy's norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import dtypes
from ..axes import normalize_axes
from ..library import call_library
from ..operations import apply, reduce
from ..tracer import Tracer
from .reductions import filled_result, is_empty


def norm(x: Tracer, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Compute `numpy.linalg.norm`; norms that need singular values are a library step."""
    axis = axis if axis is None or isinstance(axis, tuple) else int(axis)  # as NumPy does, of a float too
    axes = normalize_axes(axis, x.ndim, "norm")
    if dtypes.is_opaque(x._node.dtype) or (axis is not None and len(axes) not in (1, 2)):  # which NumPy refuses
        return call_library("linalg.norm", [x], {"ord": ord, "axis": axis, "keepdims": keepdims})
    x = x if dtypes.is_float(x._node.dtype) else x.astype("float64")
    if ord is None or (ord == "fro" and len(axes) == 2) or (ord == 2 and len(axes) == 1):
        return apply("sqrt", reduce("sum", apply("square", x), axis, keepdims))
    if len(axes) == 1 and not isinstance(ord, str):
        return _vector_norm(apply("absolute", x), ord, axis, keepdims)
    if len(axes) == 2 and ord in (1, -1, np.inf, -np.inf):
        first, second = (axes[0], axes[1]) if abs(ord) == 1 else (axes[1], axes[0])
        sums = reduce("sum", apply("absolute", x), first, True)
        result = _extreme_size(ord, sums, second, True)
        return result if keepdims else result.squeeze(axes)._as_result()
    return call_library("linalg.norm", [x], {"ord": ord, "axis": axis, "keepdims": keepdims})


def _vector_norm(size: Tracer, ord: float, axis: Any, keepdims: bool) -> Tracer:
    """Compute the vector norm of some order along an axis, given absolute values."""
    if ord == 1:
        return reduce("sum", size, axis, keepdims)
    if ord in (np.inf, -np.inf):
        return _extreme_size(ord, size, axis, keepdims)
    if ord == 0:
        return reduce("sum", apply("not_equal", size, 0.0), axis, keepdims).astype(size._node.dtype)
    return apply("power", reduce("sum", apply("power", size, float(ord)), axis, keepdims), 1.0 / float(ord))


def _extreme_size(ord: float, size: Tracer, axis: Any, keepdims: bool) -> Tracer:
    """Return the largest absolute value for a positive order, 0 if there is none, else the smallest."""
    if ord > 0 and is_empty(size, axis):
        return filled_result(size, axis, keepdims, 0)
    return reduce("max" if ord > 0 else "min", size, axis, keepdims)


def linalg_vector_norm(x: Tracer, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    if dtypes.is_complex(x._node.dtype):
        x = apply("absolute", x)
    x = x if dtypes.is_float(x._node.dtype) else x.astype("float64")
    if ord == 2:
        return apply("sqrt", reduce("sum", apply("square", x), axis, keepdims))
    return _vector_norm(apply("absolute", x), ord, axis, keepdims)


FUNCTIONS: dict[Any, Callable[..., Any]] = {np.linalg.norm: norm, np.linalg.vector_norm: linalg_vector_norm}
