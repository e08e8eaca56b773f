"""Dtypes of graphs, as strings such as "float32", and their promotion.

Planning needs no library's dtype objects; `to_numpy` and `name_of` convert at the frontends.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .errors import TraceError

FLOATS = ("float16", "bfloat16", "float32", "float64")
NAMES = ("bool", "int64", *FLOATS)
# Kernels load narrow integers as int64 and store them in their own dtype. Opaque dtypes are only passed to and from
# library steps.
NARROW = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
OPAQUE = ("uint64", "complex64", "complex128")
ITEMSIZE = {
    "bool": 1,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    **{name: np.dtype(name).itemsize for name in (*NARROW, *OPAQUE)},
}


def to_numpy(name: str) -> np.dtype[Any]:
    """Convert a dtype's name to a NumPy dtype; bfloat16 needs the package ml_dtypes."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise TypeError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from error
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@cache
def prepare_bfloat16() -> None:
    """Import ml_dtypes, which plans with bfloat16 need, if it is installed.

    It cannot be imported while a trace runs: it takes what it finds as `numpy.add` for a ufunc.
    """
    if importlib.util.find_spec("ml_dtypes") is not None:
        importlib.import_module("ml_dtypes")


@lru_cache(maxsize=64)
def name_of(dtype: Any) -> str:
    """Convert a NumPy dtype, a scalar type or a string to a dtype's name.

    Raises
    ------
    TypeError
        The dtype is not supported.
    """
    expected = f"expected one of {', '.join(FLOATS)}, an integer dtype, bool or complex"
    try:
        name = dtype if isinstance(dtype, str) and dtype in ITEMSIZE else np.dtype(dtype).name
    except TypeError as error:
        raise TypeError(f"{error}; {expected}") from None
    if name not in ITEMSIZE:
        raise TypeError(f"dtype {name!r} is not supported: {expected}; convert first, for example x.astype(np.float32)")
    return name


def is_float(name: str) -> bool:
    """Whether a dtype is a real float."""
    return name in FLOATS


def is_integer(name: str) -> bool:
    """Whether a dtype is an integer that kernels compute with: not bool, not uint64."""
    return name == "int64" or name in NARROW


def is_opaque(name: str) -> bool:
    """Whether kernels cannot compute with a dtype, so that only library steps read it."""
    return name in OPAQUE


def is_complex(name: str) -> bool:
    return name.startswith("complex")


def can_assign(source: str, target: str) -> bool:
    """Whether an in-place operation may write `source` values to a `target` array: NumPy's "same_kind" casting."""
    return _kind(source) <= _kind(target)


def _kind(name: str) -> int:
    """Rank a dtype by kind: bool, unsigned, signed, float, complex."""
    if name == "bool" or name.startswith("uint"):
        return int(name != "bool")
    return 4 if is_complex(name) else 3 if is_float(name) else 2


def compute_dtype(name: str) -> str:
    """Return the dtype of a value in registers: float32 for 16-bit floats, int64 for narrow integers."""
    return "float32" if name in ("float16", "bfloat16") else "int64" if name in NARROW else name


def promote(*names: str) -> str:
    """Promote array dtypes as `numpy.result_type`, with bfloat16 ordered beside float16."""
    result = names[0]
    for name in names[1:]:
        result = _promote_two(result, name)
    return result


@lru_cache(maxsize=256)
def _promote_two(a: str, b: str) -> str:
    """Promote two dtypes; bfloat16 promotes as float16 does, and with float16 to float32."""
    if a == b:
        return a
    if "bfloat16" not in (a, b):
        return np.promote_types(a, b).name
    other = b if a == "bfloat16" else a
    if other in ("bool", "int8", "uint8"):
        return "bfloat16"
    if other in ("int64", "int32", "uint32", "uint64", "float64"):
        return "float64"
    return other if other in ("complex64", "complex128") else "float32"


def promote_weak(strong: list[str], scalars: list[Any]) -> str:
    """Promote array dtypes with Python scalars, whose own dtypes are weak (NEP 50)."""
    base = promote(*strong) if strong else None
    kinds = {{bool: "b", int: "i", complex: "c"}.get(type(s), "f") for s in scalars}
    if "c" in kinds:
        short = base is not None and compute_dtype(base) in ("float32", "complex64")
        return "complex64" if short else "complex128"
    if "f" in kinds:
        return base if base is not None and (is_float(base) or is_complex(base)) else "float64"
    if "i" in kinds:
        return base if base is not None and base != "bool" else "int64"
    return base or "bool"


def float_dtype(name: str, operation: str) -> str:
    """Return the dtype in which a float operation such as exp computes: float64 for integers; bool is an error."""
    if is_float(name):
        return name
    if is_integer(name):
        return "float64"
    raise TraceError(
        f"{operation}: a float operand is expected, got bool; convert it first, as in x.astype(np.float32)"
    )
