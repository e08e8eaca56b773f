"""Write to standard output and standard error, which may be closed or full, and the exit statuses for that."""

from __future__ import annotations

import contextlib
import os
import sys

# Statuses beside 0, and 1 for a command that failed. Shells report a program that a signal ended as 128 + its number.
INTERRUPTED = 128 + 2
READER_GONE = 128 + 13


def write(text: str) -> int:
    """Write a command's output; return 0, or the exit status if it cannot be written."""
    if sys.stdout is None:  # closed before the interpreter started
        write_error("standard output is closed")
        return 1
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # As for `| head`, which has read enough: no error.
        _discard_buffered()
        return READER_GONE
    except OSError as error:
        _discard_buffered()
        write_error(f"standard output cannot be written: {error.strerror or error}")
        return 1
    return 0


def write_error(text: str) -> None:
    """Write a message to standard error, if that can be written."""
    # print(file=None) would write to standard output.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"cupyfuse: {text}", file=sys.stderr, flush=True)


def _discard_buffered() -> None:
    """Send what is still buffered to the null device: the interpreter would fail to flush it at exit."""
    with contextlib.suppress(OSError):  # a replaced standard output may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
