"""Arrays that a traced function created, watched for what NumPy cannot do with them and traced values.

NumPy cannot assign a traced value to an element of an array, nor index it by one. A trace that ended so is repeated
with watched arrays, which note where those were created that it failed for; there the next trace creates traced arrays.
Others stay NumPy's, whose values the function may read.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import numpy as np

# NumPy's functions that change their first argument.
_CHANGING = ("copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask")
Site = tuple[CodeType, int]  # where a function creates an array: its code, and the instruction


class Watched(np.ndarray[Any, Any]):
    """An array that notes, in the set `assigned`, its `site` when an index of it or an assignment to it fails.

    Views and copies of it, arrays like it, and what ufuncs with one result compute from it have the same site: the next
    trace makes them from a traced array.
    """

    site: Site | None
    assigned: set[Site] | None

    def __array_finalize__(self, source: Any) -> None:
        self.site, self.assigned = getattr(source, "site", None), getattr(source, "assigned", None)

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except Exception:
            self._note()
            raise

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            super().__setitem__(index, value)
        except Exception:
            self._note()
            raise

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.get("out", ())
        if out:
            options["out"] = tuple(map(unwatched, out))
        try:
            result = getattr(ufunc, method)(*map(unwatched, inputs), **options)
        except Exception:
            for target in inputs[:1] if method == "at" else out:
                if isinstance(target, Watched):
                    target._note()
            raise
        if len(out) == 1:
            return out[0]
        source = next((i for i in inputs if isinstance(i, Watched)), None)
        if source is None or type(result) is not np.ndarray:
            return result
        return watched(result, source.site, source.assigned)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        changes_self = func.__name__ in _CHANGING and bool(args) and args[0] is self
        try:
            result = super().__array_function__(func, types, args, kwargs)
        except Exception:
            if changes_self:
                self._note()
            raise
        if changes_self and result is NotImplemented:  # a traced array will refuse
            self._note()
        return result

    def _note(self) -> None:
        if self.site is not None and self.assigned is not None:
            self.assigned.add(self.site)


def watched(array: Any, site: Site | None, assigned: set[Site] | None) -> Watched:
    """Return a watched view of an array."""
    found: Watched = array.view(Watched)
    found.site, found.assigned = site, assigned
    return found


def unwatched(value: Any) -> Any:
    """Return an array as NumPy's own if it is watched; any other value unchanged."""
    return value.view(np.ndarray) if isinstance(value, Watched) else value
