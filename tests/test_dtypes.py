"""Element types and their promotion, against NumPy's own."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyfuse import dtypes
from cupyfuse.errors import TraceError

NUMPY_NAMES = [name for name in dtypes.ITEMSIZE if name != "bfloat16"]


@pytest.mark.parametrize("name", dtypes.ITEMSIZE)
def test_names_are_numpys(name: str) -> None:
    dtype = dtypes.to_numpy(name)
    assert dtypes.name_of(dtype) == dtypes.name_of(dtype.type) == dtypes.name_of(name) == name
    assert dtypes.ITEMSIZE[name] == dtype.itemsize
    assert dtypes.is_integer(name) == (dtype.kind in "iu" and name != "uint64")
    assert dtypes.is_complex(name) == (dtype.kind == "c")
    assert dtypes.is_float(name) == (dtype.kind == "f" or dtype == ml_dtypes.bfloat16)


@pytest.mark.parametrize("alias", ["f4", "<f4", ">f4", "single", np.float32, np.dtype("f4")])
def test_other_spellings(alias: Any) -> None:
    assert dtypes.name_of(alias) == "float32"


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble, object, "S3", "M8[s]", "f4,f4"])
def test_other_types_are_refused_with_advice(dtype: Any) -> None:
    with pytest.raises(TypeError, match="astype"):
        dtypes.name_of(dtype)


@pytest.mark.parametrize("pair", list(itertools.product(NUMPY_NAMES, repeat=2)))
def test_promotion_of_arrays(pair: tuple[str, str]) -> None:
    assert dtypes.promote(*pair) == np.result_type(*pair).name


@pytest.mark.parametrize("other", dtypes.ITEMSIZE)
def test_promotion_of_bfloat16(other: str) -> None:
    """As ml_dtypes promotes it; with float16, which that refuses, to the smallest type that holds both."""
    wide = dict.fromkeys(("int32", "int64", "uint32", "uint64"), "float64")
    expected = (wide | dict.fromkeys(("float16", "int16", "uint16"), "float32")).get(other)
    if expected is None:
        expected = np.promote_types(ml_dtypes.bfloat16, dtypes.to_numpy(other)).name
    assert dtypes.promote("bfloat16", other) == dtypes.promote(other, "bfloat16") == expected


@pytest.mark.parametrize("pair", list(itertools.product(NUMPY_NAMES, repeat=2)))
def test_changes_in_place_are_those_that_numpy_allows(pair: tuple[str, str]) -> None:
    assert dtypes.can_assign(*pair) == np.can_cast(*pair, casting="same_kind")


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("scalar", [True, 2, 2.5, 1j], ids=repr)
def test_python_numbers_are_weak(name: str, scalar: Any) -> None:
    expected = np.result_type(np.empty(1, name), scalar) if not isinstance(scalar, bool) else np.dtype(name)
    assert dtypes.promote_weak([name], [scalar]) == expected.name


@pytest.mark.parametrize(("scalars", "expected"), [([1.0], "float64"), ([1], "int64"), ([True], "bool"), ([], "bool")])
def test_numbers_alone(scalars: list[Any], expected: str) -> None:
    assert dtypes.promote_weak([], scalars) == expected
    assert dtypes.promote_weak([], [*scalars, 1.0]) == "float64"


def test_operations_that_work_in_floats() -> None:
    assert dtypes.float_dtype("int64", "exp") == "float64" == np.exp(np.ones(1, np.int64)).dtype.name
    assert [dtypes.float_dtype(name, "exp") for name in dtypes.FLOATS] == list(dtypes.FLOATS)
    with pytest.raises(TraceError, match="exp: a float operand"):
        dtypes.float_dtype("bool", "exp")


def test_what_16_bit_floats_compute_in() -> None:
    assert [dtypes.compute_dtype(n) for n in dtypes.NAMES] == [
        "bool",
        "int64",
        "float32",
        "float32",
        "float32",
        "float64",
    ]
