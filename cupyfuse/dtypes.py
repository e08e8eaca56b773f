"""Element types of graphs, as plain strings, and their promotion.

Planning touches no array and needs no library's dtype objects; `to_numpy` and `name_of` convert at the frontends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .errors import TraceError

FLOATS = ("float16", "bfloat16", "float32", "float64")
NAMES = ("bool", "int64", *FLOATS)
ITEMSIZE = {"bool": 1, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def to_numpy(name: str) -> np.dtype[Any]:
    """Convert to a NumPy dtype; bfloat16 needs the package ml_dtypes."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise TypeError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from error
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@lru_cache(maxsize=64)
def name_of(dtype: Any) -> str:
    """Convert a NumPy dtype, a scalar type or a string to a name.

    Raises
    ------
    TypeError
        The dtype is not supported.
    """
    name = dtype if isinstance(dtype, str) and dtype in NAMES else np.dtype(dtype).name
    if name not in NAMES:
        raise TypeError(
            f"dtype {name!r} is not supported: expected one of {', '.join(FLOATS)} (or bool for masks); "
            "convert first, for example x.astype(np.float32)"
        )
    return name


def is_float(name: str) -> bool:
    return name in FLOATS


def compute(name: str) -> str:
    """The dtype in which values are held in registers: float32 for 16-bit floats."""
    return "float32" if name in ("float16", "bfloat16") else name


def promote(*names: str) -> str:
    """NumPy's promotion of array dtypes (`numpy.result_type`), with bfloat16 ordered beside float16."""
    result = names[0]
    for name in names[1:]:
        result = _promote_two(result, name)
    return result


def _promote_two(a: str, b: str) -> str:
    if a == b:
        return a
    pair = {a, b}
    if "bool" in pair:
        return (pair - {"bool"}).pop()
    if "int64" in pair or "float64" in pair:
        return "float64"
    return "float32"


def promote_weak(strong: list[str], scalars: list[Any]) -> str:
    """Promote array dtypes with Python scalars, which are weak (NEP 50)."""
    base = promote(*strong) if strong else None
    kinds = {"b" if isinstance(s, bool) else "i" if isinstance(s, int) else "f" for s in scalars}
    if "f" in kinds:
        return base if base is not None and is_float(base) else "float64"
    if "i" in kinds:
        return base if base is not None and base != "bool" else "int64"
    return base or "bool"


def as_float(name: str, operation: str) -> str:
    """The dtype in which a float operation such as exp computes; integers become float64, bool is refused."""
    if is_float(name):
        return name
    if name == "int64":
        return "float64"
    raise TraceError(
        f"{operation}: a float operand is expected, got bool; convert it first, as in x.astype(np.float32)"
    )
