"""Functions that are generated as text."""

from __future__ import annotations

import gc
import weakref

import pytest

from cupyfuse.generated import Constants, define


def test_a_function_refers_to_values_by_name() -> None:
    constants = Constants(scale=10)
    first, second = constants.name(3), constants.name(4)
    function = define("total", "a, b=1", [f"c = a * scale + {first}", f"return c + {second} * b"], constants)
    assert (function(2), function(2, b=2)) == (27, 31)
    assert function.__name__ == "total" and "total" not in constants and first != second


def test_functions_of_one_text_share_its_code_and_no_values() -> None:
    one, two = (define("value", "", ["return c"], {"c": c}) for c in (1, 2))
    assert one.__code__ is two.__code__ and (one(), two()) == (1, 2)


def test_values_are_freed_with_their_function() -> None:
    class Value:
        pass

    held = Value()
    alive, function = weakref.ref(held), define("value", "", ["return c"], {"c": held})
    del held
    assert function() is alive()
    gc.disable()  # by their counts alone, which a cycle would keep up
    try:
        del function
        assert alive() is None
    finally:
        gc.enable()


def test_errors_name_the_function() -> None:
    with pytest.raises(TypeError, match=r"total\(\) missing 1 required positional argument: 'a'"):
        define("total", "a", ["return a"], {})()
