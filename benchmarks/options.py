"""Types of command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

import cupyfuse.heads

DTYPES = ("float32", "float16", "bfloat16")
SHAPE = (cupyfuse.heads.ROWS, cupyfuse.heads.IN_FEATURES, cupyfuse.heads.OUT_FEATURES)


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


def add_several(parser: argparse.ArgumentParser, option: str, known: Collection[str], **more: Any) -> None:
    """Add an option that takes some of the known names, by default all."""
    settings = {"default": tuple(known), "metavar": "NAME,...", "help": f"of {', '.join(known)}", **more}
    parser.add_argument(option, type=names(known), **settings)


def add_shape(parser: argparse.ArgumentParser, default: tuple[int, ...] | None = SHAPE, about: str = "") -> None:
    text = f"{about or 'rows, in_features, out_features'} (default: {default and 'x'.join(map(str, default))})"
    parser.add_argument("--shape", type=shape, default=default, metavar="BxKxN", help=text)
