"""Errors that name the line of the user's code."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from ..errors import TraceError

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NUMPY = os.path.dirname(np.__file__)
_SCIPY = os.path.join(os.path.dirname(_NUMPY), "scipy")
_SKIPPED = (_LIBRARY + os.sep, _NUMPY + os.sep, _SCIPY + os.sep, contextlib.__file__)


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame runs code outside this library, NumPy and SciPy."""
    filename = frame.f_code.co_filename
    return not os.path.abspath(filename).startswith(_SKIPPED) and not filename.startswith("<__array_function__")


def user_line() -> str:
    """Return file, line and text of the innermost frame outside this library, NumPy and SciPy."""
    import linecache

    frame = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            filename = frame.f_code.co_filename
            text = linecache.getline(filename, frame.f_lineno).strip()
            return f"{filename}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def fail(operation: str, reason: str) -> NoReturn:
    """Raise a TraceError that names the operation, the reason or the way out, and the user's line."""
    raise TraceError(f"cannot fuse {operation}: {reason}\n  at {user_line()}")


def refuse_options(operation: str, **options: Any) -> None:
    """Raise a TraceError for the first option of an operation that is not None."""
    for name, value in options.items():
        if value is not None:
            fail(f"{operation} with {name}=", "that option is not supported in a fused function")
