"""Hypothesis examples in parts, which several processes may share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, seed, settings

EXAMPLES = settings().max_examples


def searched(part: int, count: int, **strategies: Any) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """`given`, with the same examples in every run, or with others in each if CUPYFUSE_EXAMPLES says how many."""
    number = part if settings().derandomize else random.randrange(2**32)

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        chosen = settings(max_examples=max(1, count), derandomize=False, database=None)
        return seed(number)(chosen(given(**strategies)(test)))  # type: ignore[no-any-return]

    return decorate
