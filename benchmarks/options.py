"""Types of command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

DTYPES = ("float32", "float16", "bfloat16")


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, as in 'float32,bfloat16', all of them among `known`."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown[0]!r}")
        return found

    return parse


def _integers(text: str, separator: str, least: int) -> tuple[int, ...]:
    """Parse integers of at least `least`; () where the text is anything else."""
    try:
        found = tuple(int(part) for part in text.lower().split(separator))
    except ValueError:
        return ()
    return found if min(found) >= least else ()


def shape(text: str) -> tuple[int, ...]:
    """Parse rows, in_features and out_features, as in '1024x8192x8192'."""
    found = _integers(text, "x", 2)
    if len(found) != 3:
        raise argparse.ArgumentTypeError(f"expected BxKxN with numbers of at least 2, as 1024x8192x8192, got {text!r}")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Parse comma-separated lengths, as in '256,1000,4096'."""
    found = _integers(text, ",", 1)
    if not found:
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between them, got {text!r}")
    return found
