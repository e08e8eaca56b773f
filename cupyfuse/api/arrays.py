"""Array interchange: import arrays of any library without a copy, and export results to the same library.

CuPy is imported only once an array in GPU memory has arrived.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import dtypes
from ..plan.schedule import Layout, row_places, row_stride

_DLPACK_CPU, _DLPACK_CUDA = (1, 3), (2, 13)  # device types: (CPU, pinned), (CUDA, managed)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of an array, for planning without one."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)


def spec(shape: Any, dtype: Any = "float32") -> Spec:
    """Describe a contiguous array by shape and dtype, to plan without allocating it.

    Parameters
    ----------
    shape : int or tuple of int
        Lengths of the dimensions.
    dtype : str or dtype
        "float16", "bfloat16", "float32", "float64", "bool", an integer or a complex dtype.

    Returns
    -------
    Spec
        Stands for a contiguous array in `plan` and `bind`.

    Raises
    ------
    TypeError, ValueError
        `shape` is no tuple of lengths, or `dtype` is not supported.
    """
    try:
        lengths = tuple(map(operator.index, shape)) if isinstance(shape, (tuple, list)) else (operator.index(shape),)
    except TypeError:
        raise TypeError(f"shape: expected an integer or a tuple of them, got {shape!r}") from None
    if any(n < 0 for n in lengths):
        raise ValueError(f"shape: lengths cannot be negative, got {lengths}")
    try:
        if dtype is None:  # NumPy's float64
            raise TypeError("expected a dtype, got None")
        name = dtypes.name_of(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: {error}") from None
    if name == "bfloat16":
        dtypes.prepare_bfloat16()
    return Spec(lengths, name)


@dataclass(frozen=True)
class Imported:
    """An array argument as a NumPy or CuPy array, with the function that exports results to the caller's library.

    `export` is None where that library is NumPy or CuPy.
    """

    array: Any
    export: Callable[[Any], Any] | None = None


# cupy.ndarray, once somebody has imported CuPy.
CUPY_ARRAY: type | None = None


def is_cupy(value: Any) -> bool:
    """Whether a value is a CuPy array; does not import CuPy."""
    global CUPY_ARRAY
    if CUPY_ARRAY is None:
        cupy = sys.modules.get("cupy")
        if cupy is None:
            return False
        CUPY_ARRAY = cupy.ndarray
    return isinstance(value, CUPY_ARRAY)


def place_of(array: Any) -> Any:
    """Return the number of the GPU that an array is on; None for the CPU."""
    return array.data.device_id if is_cupy(array) else None


def is_array(value: Any) -> bool:
    """Whether a value is an array of any library, or a spec."""
    return isinstance(value, (np.ndarray, Spec)) or is_cupy(value) or _has_dlpack(value)


def _has_dlpack(value: Any) -> bool:
    if isinstance(value, (np.generic, type)):  # a class of arrays is none
        return False
    kind = type(value)  # objects may have attributes of any name, or raise other errors than AttributeError
    return hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")


def import_array(value: Any, name: str) -> Imported:
    """Import an array argument called `name` without a copy.

    Raises
    ------
    TypeError
        DLPack cannot exchange the array's device or dtype; the message names the argument.
    """
    if is_cupy(value):
        if type(value) is not CUPY_ARRAY:
            raise TypeError(
                f"argument {name!r}: expected a plain array, got {type(value).__name__}; pass cupy.asarray(x)"
            )
        return Imported(value)
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and type(value) is not np.memmap:
            raise TypeError(
                f"argument {name!r}: expected a plain array, got {type(value).__name__}, whose operators may differ; "
                "pass np.asarray(x), or x.filled(value) for a masked array"
            )
        return Imported(value.view(np.ndarray))
    library = f"{type(value).__module__.partition('.')[0]} array"
    if _is_negated(value):
        raise TypeError(
            f"argument {name!r}: this {library} is a view of numbers that it negates, of which DLPack loses the sign; "
            "pass x.resolve_neg(), or as `out` an array of its own"
        )
    try:
        device_type, _ = value.__dlpack_device__()
        if device_type in _DLPACK_CPU:
            return Imported(np.from_dlpack(value), _exporter(value))
        if device_type in _DLPACK_CUDA:
            return Imported(_import_cupy(name).from_dlpack(value), _exporter(value))
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise TypeError(
            f"argument {name!r}: this {library} cannot be exchanged by DLPack: {error}{_way_out(value)}"
        ) from error
    raise TypeError(
        f"argument {name!r}: expected an array in CPU or CUDA memory, got a {library} on DLPack device type "
        f"{device_type}; move it to a CUDA device first"
    )


def _is_negated(value: Any) -> bool:
    """Whether an array is a view of memory with the opposite sign, as the imaginary part of a conjugated tensor is."""
    is_neg = getattr(value, "is_neg", None)
    return is_neg is not None and bool(is_neg())


def _way_out(value: Any) -> str:
    """Return what to do about a tensor that DLPack cannot exchange, as the end of an error message."""
    if getattr(value, "requires_grad", False):
        return " (detach it first: x.detach())"
    is_conj = getattr(value, "is_conj", None)
    return " (conjugate its memory first: x.resolve_conj())" if is_conj is not None and is_conj() else ""


def on_device_of(array: Any, constant: Any) -> Any:
    """Return a constant, uploaded if it is a NumPy array and `array` is on a GPU."""
    return upload(constant, array.data.device_id) if is_cupy(array) and not is_cupy(constant) else constant


def upload(values: np.ndarray[Any, Any], device: int) -> Any:
    """Copy an array to the GPU of a number."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.asarray(values)


def _import_cupy(name: str) -> Any:
    """Import CuPy for an argument in GPU memory, or raise ImportError with what to install."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"argument {name!r} is a CUDA array, which needs CuPy: pip install 'cupyfuse[cu12]' (or [cu13])"
        ) from error
    except OSError as error:
        raise ImportError(
            f"argument {name!r} is a CUDA array, and importing CuPy failed: {error} (it caches compiled "
            "kernels in CUPY_CACHE_DIR, by default ~/.cupy)"
        ) from error
    return cupy


def _exporter(value: Any) -> Callable[[Any], Any]:
    """Return the `from_dlpack` of the array's library."""
    namespace = getattr(value, "__array_namespace__", None)
    if namespace is not None:
        return namespace().from_dlpack
    module = sys.modules.get(type(value).__module__.partition(".")[0])
    if module is not None and hasattr(module, "from_dlpack"):
        return module.from_dlpack
    raise TypeError(f"{type(value).__module__}.{type(value).__name__} has no from_dlpack to return results with")


def layout(array: Any) -> Layout:
    """Return the memory layout of an array, as far as plans depend on it."""
    if isinstance(array, Spec):
        if array.ndim < 2:
            return _VECTOR
        rows, cols = math.prod(array.shape[:-1]), array.shape[-1]
        return Layout(unit_rows=rows <= 1 or cols <= 1)
    itemsize = array.dtype.itemsize
    if any(s % itemsize for s in array.strides):
        return _UNREADABLE
    return strided_layout(array.shape, [s // itemsize for s in array.strides], array.flags.c_contiguous)


def strided_layout(shape: Sequence[int], strides: Sequence[int], contiguous: bool) -> Layout:
    """Return the layout of an array from its strides in elements."""
    if len(shape) > 2:
        down = row_stride(shape, strides)
        if down is None:
            places = row_places(shape, strides)
            return replace(_UNFOLDABLE, rows=places.repeats) if places else _UNFOLDABLE
        shape, strides = (math.prod(shape[:-1]), shape[-1]), (down, strides[-1])
    if len(shape) == 2:
        rows, cols = shape
        down, across = strides
        unit_cols, unit_rows = across == 1 or cols <= 1, down == 1 or rows <= 1
        by_rows = unit_cols and (rows <= 1 or cols <= down < _BLAS_LIMIT)
        by_cols = unit_rows and (cols <= 1 or rows <= across < _BLAS_LIMIT)
        return Layout(unit_cols, unit_rows, contiguous, by_rows or by_cols)
    if len(shape) == 1:
        unit = strides[0] == 1 or shape[0] <= 1
        return Layout(unit, True, unit, unit)
    return _VECTOR


_BLAS_LIMIT = 1 << 31  # cuBLAS takes leading dimensions as 32-bit integers
_VECTOR = Layout(unit_rows=True)  # contiguous, or a single element
_UNREADABLE = Layout(unit_cols=False, unit_rows=False, contiguous=False, blas=False)
_UNFOLDABLE = Layout(unit_cols=False, unit_rows=False, contiguous=False, blas=False, foldable=False)


def address_range(a: Any) -> tuple[int, int]:
    """Return the half-open address range of an array's bytes."""
    if a.size == 0:
        return (0, 0)
    low = a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr
    if a.flags.c_contiguous:
        return low, low + a.nbytes
    high = low
    for length, stride in zip(a.shape, a.strides, strict=True):
        low += min(0, stride * (length - 1))
        high += max(0, stride * (length - 1))
    return low, high + a.itemsize


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether the address ranges of two arrays of one library overlap."""
    return may_share_memory_with_any(a, [b])


def may_share_memory_with_any(a: Any, others: Sequence[Any]) -> bool:
    """Whether the address range of an array overlaps with that of any other, all of one library."""
    if isinstance(a, np.ndarray):
        return any(np.may_share_memory(a, b) for b in others)  # a tenth of what the ranges below take
    start, stop = address_range(a)
    return any(start < other_stop and other_start < stop for other_start, other_stop in map(address_range, others))


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays of one library have an address in common; True where that takes long to find out.

    Strided views may not, such as ``x[::2]`` and ``x[1::2]``, although their address ranges overlap.
    """
    if not may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(_as_numpy(a), _as_numpy(b), _MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy's TooHardError
        return True


def is_same(a: Any, b: Any) -> bool:
    """Whether two arrays of one library have the same elements at the same addresses."""
    one, other = (_as_numpy(array).__array_interface__ for array in (a, b))
    return all(one[key] == other[key] for key in ("data", "shape", "strides", "typestr"))


class _Interface:
    """The addresses of a GPU array for NumPy, which compares them without reading there."""

    def __init__(self, a: Any):
        place = {"shape": a.shape, "strides": a.strides, "typestr": f"|V{a.itemsize}", "data": (a.data.ptr, True)}
        self.__array_interface__ = {"version": 3, **place}


def _as_numpy(a: Any) -> Any:
    return a if isinstance(a, np.ndarray) else np.asarray(_Interface(a))


_MOST_WORK = 10_000  # of NumPy's solver, which takes a millisecond or so for it


def duplicates(arrays: Sequence[Any]) -> dict[int, int]:
    """Map the position of each array that is the same object as an earlier one to that one's; specs are left out."""
    ids = list(map(id, arrays))
    if len(set(ids)) == len(ids):
        return {}
    first: dict[int, int] = {}
    found = {i: first[number] for i, number in enumerate(ids) if first.setdefault(number, i) != i}
    return {i: earlier for i, earlier in found.items() if not isinstance(arrays[i], Spec)}
