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


def _integers(separator: str, least: int, what: str, count: int = 0) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of integers of at least `least`: of `count` of them, or of any number (0)."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in text.lower().split(separator))
        except ValueError:
            found = ()
        if not found or min(found) < least or count not in (0, len(found)):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return found

    return parse


# Rows, in_features and out_features, as in '1024x8192x8192'; comma-separated lengths, as in '256,1000,4096'.
shape = _integers("x", 2, "BxKxN with numbers of at least 2, as 1024x8192x8192", 3)
lengths = _integers(",", 1, "positive numbers with commas between them")
