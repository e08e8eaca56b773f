"""Errors that name the line of the user's code."""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, NoReturn

import numpy as np

from ..errors import TraceError

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NUMPY = os.path.dirname(np.__file__)
_SCIPY = os.path.join(os.path.dirname(_NUMPY), "scipy")
_SKIPPED = (_LIBRARY + os.sep, _NUMPY + os.sep, _SCIPY + os.sep, contextlib.__file__)
_GENERATED = ("<__array_function__", "<stringsource")  # NumPy's dispatch, and Cython's own code
_PACKAGES = tuple(p + os.sep for p in (*map(sysconfig.get_path, ("purelib", "platlib")), os.path.dirname(_NUMPY)))
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_TRACING = os.path.join(_LIBRARY, "api", "tracing.py")  # which runs the user's function
_INSTALLED = (_STANDARD, *_PACKAGES)

_refusals: ContextVar[list[TraceError] | None] = ContextVar("cupyfuse_refusals", default=None)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package."""
    return filename.startswith(_INSTALLED)


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame runs code outside this library, NumPy and SciPy."""
    filename = frame.f_code.co_filename
    compiled = filename.startswith(_GENERATED) or filename.endswith(".pyx")
    return not (compiled or os.path.abspath(filename).startswith(_SKIPPED))


def is_called_from_compiled_code(frame: FrameType) -> bool:
    """Whether compiled code, not a statement in the frame that it is called from, assigns to elements of an array."""
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("STORE_")


def user_line() -> str:
    """Return file, line and text of the innermost frame outside this library, NumPy, SciPy and Python's own library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame) and not _is_of_python(frame):
            return _describe_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"


def _is_of_python(frame: FrameType) -> bool:
    """Whether a frame runs code of Python's standard library, as `statistics` and `random` call traced arrays."""
    filename = os.path.abspath(frame.f_code.co_filename)
    return filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)


def handlers_around() -> tuple[tuple[CodeType, int], ...]:
    """Return the places in the user's code that an operation is called from and that may catch what it raises.

    These are codes with the positions of their instructions. Python 3.10 does not tell which code has handlers.
    """
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None and frame.f_code.co_filename != _TRACING:
        if getattr(frame.f_code, "co_exceptiontable", True) and is_user_frame(frame):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class StepFailed(np.linalg.LinAlgError, ValueError, IndexError, ZeroDivisionError, OverflowError):
    """What a trace raises in the place of an operation, to find out whether the user's code catches its errors."""


def definition_of(function: Any) -> str:
    """Return file, line and text of where a function is defined, else its name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else _describe_line(code.co_filename, code.co_firstlineno)


def _line_of(error: Exception) -> str:
    """Return file, line and text of the innermost such frame that an error passed."""
    passed = traceback.walk_tb(error.__traceback__)
    found = [(frame, number) for frame, number in passed if is_user_frame(frame) and not _is_of_python(frame)]
    return _describe_line(found[-1][0].f_code.co_filename, found[-1][1]) if found else "an unknown line"


# What compiled code says of a traced array where it asked for one of NumPy's.
_ASKED_FOR_ARRAY = re.compile(
    r"\bTracer\b(?!.* at )|__array_(interface|struct)__|^setting an array element with a sequence(?!.*inhomogeneous)"
)
NEEDED_INTEGER = (
    "a conversion of a traced array to a Python value, as a length, an axis or an index of a list: values are not "
    "known while the function is traced, and shapes cannot depend on them; take the whole array, and choose by "
    "np.where or a mask, and by .item() for a number to compute with"
)
_ASKED_FOR_INTEGER = re.compile(r"\b(?:got|not) '?<traced array, shape \(\)")


# What Python says of an assignment to an attribute of a traced array: to a property, and to one that it has not.
_ASSIGNED_ATTRIBUTE = re.compile(
    r"^property '(\w+)' of 'Tracer' object has no setter|^can't set attribute '(\w+)'$"
    r"|^'Tracer' object has no attribute '(\w+)'$"
)

# What Python says of a call of a traced array's method with arguments that it does not take, and of a method of the
# class `np.ndarray` that is called with a traced array, which is none.
_MISFIT = re.compile(r"^(?:Tracer|Arithmetic)\.(\w+\(\) (?:got|takes|missing) .*)")
_OF_CLASS = re.compile(r"^descriptor '(\w+)' (?:for|requires a) 'numpy\.ndarray'")


def took_array_of_compiled_code(error: Exception) -> bool:
    """Whether compiled code failed since an array that it had created itself, or was given, was a traced one."""
    return str(error.__cause__).startswith("Cannot convert Tracer to ")


def _function_of(error: Exception) -> str:
    """Return the name of the function of NumPy's or SciPy's that the user's code called and an error passed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((k for k, frame in enumerate(frames) if is_user_frame(frame)), default=-1)
    for frame in frames[last + 1 :]:
        module, name = str(frame.f_globals.get("__name__")).partition("._")[0], frame.f_code.co_name
        if module.startswith(("numpy", "scipy.")) and hasattr(sys.modules.get(module), name):
            return f"{module}.{name}: it calls compiled code"
    return "a call of compiled code"


def _describe_line(filename: str, number: int) -> str:
    import linecache

    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}" + (f": {text}" if text else "")


def fail(operation: str, reason: str) -> NoReturn:
    """Raise a TraceError that names the operation, the reason or the way out, and the user's line."""
    error = TraceError(f"cannot fuse {operation}: {reason}\n  at {user_line()}")
    noted = _refusals.get()
    if noted is not None and _is_called_by_user():
        noted.append(error)
    raise error


_ERRORS = (
    TypeError,
    ValueError,
    IndexError,
    OverflowError,
    ZeroDivisionError,
    np.exceptions.AxisError,
    np.linalg.LinAlgError,
)


def reraise(name: str, error: Exception) -> NoReturn:
    """Raise an error of NumPy's again, with the name of the function and the user's line."""
    kind = type(error) if type(error) in _ERRORS else ValueError if isinstance(error, ValueError) else TypeError
    raise kind(f"{name}: {error}\n  at {user_line()}") from error


@contextlib.contextmanager
def refusals_reach_the_caller() -> Iterator[None]:
    """Raise what `fail` refuses in a `with` block, even where the user's code catches it.

    A function that catches the error would go on with a branch that the plain function does not take.
    """
    noted: list[TraceError] = []
    token = _refusals.set(noted)
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        if noted:
            raise noted[0] from error
        if type(error) is AttributeError and (found := _ASSIGNED_ATTRIBUTE.search(str(error))):
            raise TraceError(
                f"cannot fuse an assignment to the attribute {found[found.lastindex or 0]!r} of an array: make "
                f"another array, as x.reshape(...) or x.astype(...) do\n  at {_line_of(error)}"
            ) from error
        if type(error) is TypeError and (found := _MISFIT.search(str(error))):
            raise TypeError(f"ndarray.{found[1]}\n  at {_line_of(error)}") from error
        if type(error) is TypeError and (found := _OF_CLASS.search(str(error))):
            raise TraceError(
                f"cannot fuse np.ndarray.{found[1]} of a traced array: take it from the array itself, as x.{found[1]}"
                f"\n  at {_line_of(error)}"
            ) from error
        if type(error) is TypeError and _ASKED_FOR_INTEGER.search(str(error)):
            raise TraceError(f"cannot fuse {NEEDED_INTEGER}\n  at {_line_of(error)}") from error
        said = str(error).partition("\n  at ")[0]
        if type(error) in (AttributeError, TypeError, ValueError) and _ASKED_FOR_ARRAY.search(said):
            raise TraceError(
                f"cannot fuse {_function_of(error)} that reads arrays in memory; call it outside of the fused "
                f"function\n  at {_line_of(error)}"
            ) from error
        raise
    finally:
        _refusals.reset(token)
    if noted:
        raise noted[0]


def _is_called_by_user() -> bool:
    """Whether user code called this library itself: NumPy, SciPy and other libraries may try one way after another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY + os.sep):
        frame = frame.f_back
    return frame is not None and is_user_frame(frame) and not is_installed(frame.f_code.co_filename)


def refuse_options(operation: str, **options: Any) -> None:
    """Raise a TraceError for the first option of an operation that is not None."""
    for name, value in options.items():
        if value is not None:
            fail(f"{operation} with {name}=", "that option is not supported in a fused function")
