"""What several commands take on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between them, as in 'float32,bfloat16', each of them known."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        wrong = [name for name in found if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {wrong[0]!r}")
        return found

    return names
