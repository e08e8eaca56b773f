"""The C types of dtypes, as arrays in memory have them and as kernels compute in them."""

from __future__ import annotations

from .. import dtypes

_C_TYPES = {
    "bool": "bool",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
}


def stored_type(dtype: str) -> str:
    """Return the C type in which a dtype is stored."""
    return _C_TYPES[dtype]


def c_type(dtype: str) -> str:
    """Return the C type in which a dtype is computed."""
    return _C_TYPES[dtypes.compute_dtype(dtype)]
