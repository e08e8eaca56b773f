"""Rules for the shapes and dtypes of results of library functions that are not called on sample arrays.

Their work grows faster than their operands, or zeros and ones do not tell the shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.library import Operand

Shape = tuple[int, ...]


def _linalg_dtype(dtype: Any) -> Any:
    """Return the dtype in which `np.linalg` computes with arrays of a dtype; None if it refuses them."""
    name = np.dtype(dtype).name
    if name in ("float32", "float64", "complex64", "complex128"):
        return np.dtype(name)
    return np.dtype(np.float64) if np.dtype(dtype).kind in "iub" else None


def _like_square_matrix(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.inv and cholesky: those of the operand."""
    shape, dtype = metadata[0]
    dtype = _linalg_dtype(dtype)
    fits = len(metadata) == 1 == len(arguments) and len(shape) >= 2 and shape[-1] == shape[-2]
    return (shape, dtype) if fits and dtype is not None and not options else None


def _of_solve(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.solve for one matrix, with one right-hand side or several."""
    if len(metadata) != 2 or len(arguments) != 2 or options:
        return None
    (matrix, first), (right, second) = metadata
    computed = [_linalg_dtype(d) for d in (first, second)]
    fits = len(matrix) == 2 and matrix[0] == matrix[1] and len(right) in (1, 2) and right[0] == matrix[0]
    return (right, np.result_type(*computed)) if fits and None not in computed else None


def _of_polyfit(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.polyfit where it returns the coefficients alone."""
    degree = options.get("deg", arguments[2] if len(arguments) > 2 else None)
    if not isinstance(degree, int) or len(arguments) > 3 or not set(options) <= {"deg", "w"} or len(arguments) < 2:
        return None
    shape, dtype = metadata[-2 if "w" in options and isinstance(options["w"], Operand) else -1]
    values = arguments[1]
    return None if not isinstance(values, Operand) else ((degree + 1, *shape[1:]), np.result_type(dtype, np.float64))


def _of_det(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.det: one number for each matrix."""
    known = _like_square_matrix(metadata, arguments, options)
    return None if known is None else (known[0][:-2], known[1])


def _of_bincount(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.bincount of labels below `minlength`; the step checks the shape again when it runs."""
    given = dict(zip(("x", "weights", "minlength"), arguments, strict=False)) | options
    (shape, dtype), length = metadata[0], given.get("minlength")
    fits = len(shape) == 1 and all(s == shape for s, _ in metadata) and isinstance(given.get("x"), Operand)
    casts = np.can_cast(dtype, np.intp) and all(np.can_cast(d, np.float64) for _, d in metadata)
    if not (fits and casts and isinstance(length, (int, np.integer)) and length > 0):
        return None
    counts = given.get("weights") is None or shape == (0,)  # of no labels NumPy reads no weights
    return (int(length),), np.dtype(np.int64 if counts else np.float64)


# By function: (shape, dtype) of the result, from those of the operands, the arguments and the options; None where a
# rule does not know, and NumPy's function is called.
SHAPES: dict[str, Callable[[list[tuple[Shape, Any]], tuple[Any, ...], dict[str, Any]], Any]] = {
    "linalg.inv": _like_square_matrix,
    "linalg.cholesky": _like_square_matrix,
    "linalg.solve": _of_solve,
    "linalg.det": _of_det,
    "polyfit": _of_polyfit,
    "bincount": _of_bincount,
}
