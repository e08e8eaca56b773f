"""Functions that run as written: on the CPU, where a plan would gain nothing (see `engines/host_time.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..plan.plan import Plan
from .results import Results


class AsWritten:
    """A function called as it is, and its results brought into the form that a plan would give them.

    They have the traced structure, shapes and dtypes, and share no memory with the arguments or with each other.
    """

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature, results: Results, plan: Plan):
        self._function, self._signature, self._results, self._plan = function, signature, results, plan
        self._forms = [(o.shape, np.dtype(dtypes.to_numpy(o.dtype))) for o in plan.outputs]
        kinds = {p.kind for p in signature.parameters.values()}
        self._by_position = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}

    def __call__(self, values: Sequence[Any], leaves: Sequence[Any]) -> list[Any] | None:
        """Return the results for the values of all parameters.

        `leaves` are the arrays among the values, and those that the function reads around it. If the function computes
        something else than was traced, None: its plan runs then, in later calls too.
        """
        results = self._call(values)
        if results is None or not all(map(self._has_form, results, self._forms)):
            self._plan.as_written = ""
            return None
        own: list[Any] = []
        for result in results:
            own.append(_separate(result, leaves, own))
        return own

    def _call(self, values: Sequence[Any]) -> list[Any] | None:
        if self._by_position:
            with np.errstate(all="ignore"):
                returned = self._function(*values)
        else:
            bound = self._signature.bind_partial()
            bound.arguments.update(zip(self._signature.parameters, values, strict=True))
            with np.errstate(all="ignore"):
                returned = self._function(*bound.args, **bound.kwargs)
        return self._results.arrays_in(returned)

    @staticmethod
    def _has_form(result: Any, form: tuple[tuple[int, ...], Any]) -> bool:
        return isinstance(result, (np.ndarray, np.generic)) and result.shape == form[0] and result.dtype == form[1]


def _separate(result: Any, leaves: Sequence[Any], before: Sequence[Any]) -> Any:
    """Return a result that shares no memory with other arrays: itself, or a copy."""
    if not isinstance(result, np.ndarray):
        return result  # a scalar
    others = [*leaves, *before] if result.base is not None else [a for a in (*leaves, *before) if a is result]
    if any(isinstance(a, np.ndarray) and np.may_share_memory(result, a) for a in others):
        return result.copy()
    return result
