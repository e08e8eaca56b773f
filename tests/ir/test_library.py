"""Calls of a library's functions: their arguments, and what is checked of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyfuse.errors import EngineError
from cupyfuse.ir.library import LibraryCall, Operand, filler

FIRST, SECOND = Operand(0), Operand(1)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        (FIRST, "a"),
        ((FIRST, 1), ("a", 1)),
        ([[FIRST, (SECOND, 2)], 3], [["a", ("b", 2)], 3]),
        ({"x": FIRST, "axis": 1}, {"x": "a", "axis": 1}),
        ((slice(2), [1, 2], {"k": [SECOND]}), (slice(2), [1, 2], {"k": ["b"]})),
        ((), ()),
        ({}, {}),
    ],
)
def test_operands_are_replaced_wherever_they_are(template: Any, filled: Any) -> None:
    fill = filler(template)
    for _ in range(2):
        found = fill(["a", "b"])
        assert found == filled and type(found) is type(filled)


def call_of(results: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> LibraryCall:
    return LibraryCall("f", (FIRST,), {"axis": 1}, ((2,),), results, dtypes)


def test_results_are_checked() -> None:
    x = np.ones(2)

    def returns(result: Any) -> Any:
        def function(given: Any, axis: int) -> Any:
            assert given is x and axis == 1
            return result

        return function

    one, two = call_of(((2,),), ("float64",)), call_of(((2,), ()), ("float64", "complex128"))
    assert one.prepare(returns(x))([x]) == [x]
    assert two.prepare(returns((x, 1j)))([x]) == [x, 1j]
    for call, result in ((one, x[:1]), (one, (x, x)), (two, (x, x)), (two, (x,))):
        with pytest.raises(EngineError, match=r"np\.f: results of shapes .* were planned, for these values"):
            call.prepare(returns(result))([x])
    assert two.prepare(returns((x, x)), needed=[0])([x]) == [x, x]
    for call, result in ((two, (x[:1], 1j)), (two, (x,))):
        with pytest.raises(EngineError, match="were planned"):
            call.prepare(returns(result), needed=[0])([x])
    with pytest.raises(EngineError, match=r"np\.f: float64 results were planned, .*complex128 ones.*\.astype"):
        one.prepare(returns(x * 1j))([x])
