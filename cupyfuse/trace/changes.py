"""`Changes`: changes in place of traced arrays, and the views, parts and reshaped arrays that share their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.library import SET_PART
from .arithmetic import Arithmetic
from .python_numbers import as_python_like
from .user_code import fail, user_line

_ZEROS_LIKE = np.zeros_like  # another stands for it in the module `numpy` while a trace runs


class Changes(Arithmetic):
    """A traced value that can be changed in place; `Tracer` implements what depends on the trace."""

    # fmt: off
    __slots__ = (
        "_aliases", "_get", "_is_array", "_is_stale", "_origin", "_parent", "_put", "_read_only", "_selection",
        "_shared", "_views",
    )
    # fmt: on
    _aliases: list[Any] | None
    _get: Callable[[Any, Any], Any]
    _is_array: bool
    _is_stale: bool
    _origin: g.Node | None
    _parent: Any
    _put: Callable[[Any, Any, Any], Any]
    _read_only: bool
    _selection: Any
    _shared: bool
    _views: list[Any]

    # Parts of complex arrays
    @property
    def real(self) -> Any:
        return self._part("real") if dtypes.is_complex(self._node.dtype) else self

    @real.setter
    def real(self, value: Any) -> None:
        self.real[...] = value

    @property
    def imag(self) -> Any:
        if dtypes.is_complex(self._node.dtype):
            return self._part("imag")
        zeros = self._trace.call_function(_ZEROS_LIKE, (self,), {})._with_kind_of(self)
        zeros._read_only = not zeros._is_scalar
        return zeros

    @imag.setter
    def imag(self, value: Any) -> None:
        if not dtypes.is_complex(self._node.dtype):
            raise TypeError(f"array does not have imaginary part to set\n  at {user_line()}")
        self.imag[...] = value

    def _part(self, name: str) -> Any:
        """Return a view of the real or the imaginary parts; of a complex number of Python's, one of its floats."""
        return as_python_like(self._make_view(_get_part, _put_part, name), self)

    # Changes in place change the tracer itself, since other variables of the user's function may refer to it.
    def _assign(self, value: Any) -> None:
        """Assign all elements, as `x[...] = value` does: cast to this dtype, without leading axes of length one."""
        new = self._trace.tracer_of(value)
        extra = new.ndim - self.ndim
        if extra > 0 and new.shape[:extra] == (1,) * extra:
            new = self._trace.array(new._node, new._axes.picked(range(extra, new.ndim)))
        self._replace(new)

    def _assign_all(self, value: Any) -> Any:
        """Assign all elements, as in-place operators and out= do: cast to this dtype within the same kind."""
        new = self._trace.tracer_of(value)
        if not self._is_scalar and not dtypes.can_assign(new._node.dtype, self._node.dtype):
            raise TypeError(
                f"Cannot cast the result of an in-place change from {new.dtype!r} to {self.dtype!r} with casting rule "
                f"'same_kind': convert it with .astype first\n  at {user_line()}"
            )
        self._replace(new)
        return self

    def _replace(self, new: Any) -> None:
        """Replace the value of a writable array, and invalidate arrays that may share its memory."""
        if dtypes.is_opaque(new._node.dtype):
            new = new.astype(self._node.dtype, copy=False)  # by a library step: kernels do not take it
        root = self._root
        if self._is_scalar:
            raise TypeError(
                f"a NumPy scalar ({self._node.dtype}), as reductions to a single value return it, cannot be changed in "
                f"place\n  at {user_line()}"
            )
        if root._read_only:
            raise ValueError(f"assignment destination is read-only: the imaginary part of reals\n  at {user_line()}")
        aliases = root._aliases or ()
        if self._shared or root._shared or any(a._origin is not None for a in aliases):
            fail(
                "an in-place change of an array that may share memory with a reshaped, broadcast or converted one",
                "write y = y + 1 instead of y += 1, or reshape later",
            )
        for alias in aliases:
            if alias is not root:
                alias._invalidate()
        root._aliases = None
        if new.shape != self.shape:
            new = self._trace.expand(new, self.shape)
        if dtypes.is_opaque(self._node.dtype) and new._node.dtype != self._node.dtype:
            self._store(new.astype(self._node.dtype))  # by a library step, too
        else:
            self._store(self._trace.array(g.cast(new._node, self._node.dtype), new._axes))

    def _store(self, new: Any) -> None:
        """Take the value of an array of the same shape; a view writes it to the array that it is a view of."""
        if self._parent is not None:
            with self._trace.quiet():  # in memory the operation has changed the view in place
                self._parent._store(self._put(self._parent, self._selection, new))
            return
        self._set(self._trace.refolded(new, self._axes))
        if self._origin is not None:
            self._trace.effects[self._origin.argument] = self._node

    def _set(self, new: Any) -> None:
        """Take a value, which views read again where they are used."""
        self._node, self._axes = new._node, new._axes
        for view in self._views:
            view._forget()

    def _forget(self) -> None:
        """Delete the value of a view, and of the views of it."""
        if not self._is_stale:
            self._is_stale = True
            del self._node, self._axes
            for view in self._views:
                view._forget()

    def __getattr__(self, name: str) -> Any:
        if name not in ("_node", "_axes") or not self._is_stale:
            return super().__getattr__(name)
        assert self._parent is not None
        new = self._get(self._parent, self._selection)
        self._node, self._axes, self._is_stale = new._node, new._axes, False
        return getattr(self, name)

    @property
    def _root(self) -> Any:
        """The array that this one is a view of, through any number of views; itself if it is no view."""
        root = self
        while root._parent is not None:
            root = root._parent
        return root

    def _make_view(self, get: Any, put: Any, selection: Any) -> Any:
        """Make a view, which is `get(array, selection)`; an assignment to it is one of `put(array, selection, value)`.

        Of a scalar, which cannot change, a copy is made.
        """
        view: Any = get(self, selection)
        if self._is_scalar:
            return view
        view._parent, view._get, view._put, view._selection = self, get, put, selection
        view._is_array = True
        self._views.append(view)
        return view

    def _mark_shared(self) -> None:
        """Mark this array as possibly sharing memory with another, so that it cannot be changed in place."""
        for array in (self, self._root, *(self._root._aliases or ())):
            array._shared = True

    def _add_alias(self, reshaped: Any) -> Any:
        """Note that another array is this one reshaped: a change in place of one invalidates the others."""
        root = self._root
        if root._aliases is None:
            root._aliases = [root]
        root._aliases.append(reshaped)
        reshaped._aliases = root._aliases
        reshaped._shared = self._shared or root._shared
        return reshaped

    def _invalidate(self) -> None:
        """Delete the value, since shared memory may hold another now; using the array is an error."""
        self._node = None  # type: ignore[assignment]  # of a stale view too
        del self._node
        for view in self._views:
            view._invalidate()

    def _is_view(self, array: Any, selection: Any) -> bool:
        """Whether this is the view of an array by a selection."""
        return self._parent is array and _are_same(self._selection, selection)

    def _updated(self, value: Any) -> Any:
        """Return the result of an in-place operator: the updated array itself, or the new value of a scalar."""
        return value if self._is_scalar else self._assign_all(value)


def _are_same(one: Any, other: Any) -> bool:
    """Whether two selections are equal, whose traced numbers are the same objects."""
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Changes) or isinstance(other, Changes):
        return one is other
    return type(one) is type(other) and bool(one == other)


def _get_part(x: Any, name: str) -> Any:
    """Return the real or the imaginary part of a complex array."""
    part: Any = x._trace.call_library(name, [x])
    return part


def _put_part(x: Any, name: str, value: Any) -> Any:
    """Return a complex array with another real or imaginary part."""
    changed: Any = x._trace.call_library(SET_PART[name], [x, value])
    return changed
