"""Dispatch of NumPy's functions: to a native form, a library step, or an error that says why there is neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import dtypes
from ..library import call_library, tracers_in
from ..masked_reductions import refuse
from ..places import call_on_masked, holds_masked
from ..tracer import Tracer
from ..user_code import fail, user_line
from ..value import IN_PLACE_METHODS, METHODS
from . import callbacks, functions, norms, products, reductions, writing
from .signatures import names_of_parameters, signature_of
from .steps import LIBRARY, NATIVE_FOR_REALS, REFUSED, public_name
from .writing import CONVERTING, assign_out, dtype_with_out, target_of, with_traced_operand

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **functions.FUNCTIONS,
    **reductions.FUNCTIONS,
    **norms.FUNCTIONS,
    **products.FUNCTIONS,
    **writing.FUNCTIONS,
    **callbacks.FUNCTIONS,
}

_METHODS = {name: getattr(np, name) for name in METHODS}


def call_function(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a NumPy function on traced arrays, natively or by a library step.

    Raises
    ------
    TraceError
        The function has neither form, or these arguments cannot be traced.
    """
    name = public_name(func)
    args, options = _with_named_out(func, args, options)
    options.pop("overwrite_input", None)  # which permits, but does not require it: other steps read the operand
    out = options.pop("out", None)
    if out is not None:
        out = target_of(f"np.{name} with out=", out)
        args = with_traced_operand(args, out) if func in FUNCTIONS else args
        has_dtype = name in CONVERTING and "dtype" in signature_of(func).parameters
        if has_dtype and options.get("dtype") is None and (dtype := dtype_with_out(args[0], out)) is not None:
            options["dtype"] = dtype
        return assign_out(name, out, call_function(func, args, options))
    is_masked = holds_masked((args, options))
    if is_masked and name not in LIBRARY and name not in REFUSED:
        refuse(f"np.{name} of masked elements")
    if (
        func in FUNCTIONS
        and not is_masked
        and not (name in NATIVE_FOR_REALS and any(map(_is_complex, tracers_in((args, options)))))
    ):
        return _call_native(func, name, args, options)
    if name in REFUSED:
        fail(f"np.{name}", REFUSED[name])
    if name not in LIBRARY:
        fail(f"np.{name}", "it has neither a fused form nor a library step; call it outside of the fused function")
    if name.startswith("histogram") and isinstance(options.get("bins", args[1] if len(args) > 1 else 10), str):
        fail(f"np.{name}", "the number of bins depends on values; give it as a number")
    if name == "bincount" and not options.get("minlength", args[2] if len(args) > 2 else 0):
        fail(f"np.{name}", "the length of its result depends on values; give minlength=, the number of bins")
    if is_masked:
        return call_on_masked(name, args, options)
    return call_library(name, args, options)


def _with_named_out(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments with the array that the function writes to, and what is behind it, by their names."""
    names = names_of_parameters(func)
    place = names.index("out") if "out" in names else len(args)
    return args[:place], options | dict(zip(names[place:], args[place:], strict=False))


def _is_complex(x: Tracer) -> bool:
    return dtypes.is_complex(x._node.dtype)


def _call_native(func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a native form, recorded as one call; TypeErrors about arguments name the user's line."""
    operands = list(tracers_in((args, options)))
    args = with_traced_operand(args, operands[0]) if operands else args
    try:
        if not operands:
            return FUNCTIONS[func](*args, **options)
        with operands[0]._trace.call(name, operands) as record:
            result = FUNCTIONS[func](*args, **options)
            for tracer in tracers_in(result):
                record(tracer)
            return result
    except TypeError as error:
        if type(error) is TypeError and "\n  at " not in str(error):
            raise TypeError(f"np.{name}: {error}\n  at {user_line()}") from error
        raise


def call_method(name: str, x: Tracer, *args: Any, **options: Any) -> Any:
    """Call an array method by NumPy's function of the same name; `sort` and `partition` change the array."""
    result = call_function(_METHODS[name], (x, *args), options)
    if name not in IN_PLACE_METHODS:
        return result
    x._assign_all(result)
    return None
