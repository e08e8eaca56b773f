"""Look a NumPy function up: a native form, a library step, or an error that says why neither serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..library import call_library, tracers_in
from ..tracer import Tracer
from ..user_code import fail, user_line
from ..value import IN_PLACE_METHODS
from . import functions, products, reductions
from .steps import LIBRARY, REFUSED, public_name

FUNCTIONS: dict[Any, Callable[..., Any]] = {**functions.FUNCTIONS, **reductions.FUNCTIONS, **products.FUNCTIONS}


def call_function(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a NumPy function on traced arrays."""
    name = public_name(func)
    if func in FUNCTIONS:
        return _call_native(func, name, args, options)
    if name in REFUSED:
        fail(f"np.{name}", REFUSED[name])
    if name not in LIBRARY:
        fail(f"np.{name}", "it has neither a fused form nor a library step; call it outside of the fused function")
    if name.startswith("histogram") and isinstance(options.get("bins", args[1] if len(args) > 1 else 10), str):
        fail(f"np.{name}", "the number of bins depends on values; give it as a number")
    out = options.pop("out", None)
    if out is None:
        return call_library(name, args, options)
    if not isinstance(out, Tracer):
        fail(f"np.{name} with out=", "the output array has to be an argument of the fused function or computed in it")
    return out._assign(call_library(name, args, options))


def _call_native(func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    operands = list(tracers_in((args, options)))
    try:
        if not operands:
            return FUNCTIONS[func](*args, **options)
        with operands[0]._trace.call(name, operands) as done:
            result = FUNCTIONS[func](*args, **options)
            for tracer in tracers_in(result):
                done(tracer)
            return result
    except TypeError as error:
        if type(error) is TypeError and "\n  at " not in str(error):
            raise TypeError(f"np.{name}: {error}\n  at {user_line()}") from error
        raise


def call_method(name: str, x: Tracer, *args: Any, **options: Any) -> Any:
    """Call an array method that is a function of NumPy's; `sort` and `partition` change the array."""
    result = call_function(getattr(np, name), (x, *args), options)
    if name not in IN_PLACE_METHODS:
        return result
    x._assign(result)
    return None
