"""`TracedValue`: array attributes that are known while tracing, and errors for those that need values."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..errors import TraceAttributeError
from ..ir import graph as g
from .axes import Axes
from .memory import UNKNOWN, Flags
from .user_code import NEEDED_INTEGER, fail, user_line

# Array methods that are NumPy's functions of the same name, and those of them that change the array in place.
METHODS = (
    *("sum", "prod", "mean", "max", "min", "var", "std", "argmax", "argmin", "cumsum", "cumprod", "round"),
    *("sort", "argsort", "partition", "argpartition", "searchsorted"),
    *("repeat", "take", "put", "trace", "diagonal", "choose", "nonzero"),
)
IN_PLACE_METHODS = ("sort", "partition")

# NumPy's numbers that may change from call to call.
NUMPY_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
NUMPY_NUMBERS = (np.float64, np.float32, np.float16, *NUMPY_INTEGERS)


def filled_with(number: Any, dtype: Any) -> Any:
    """Return what an array of a dtype holds once it is filled with a number; NumPy checks that, and may refuse it."""
    held = np.empty((), dtype)
    held.fill(number)
    return held[()]


LONGEST_ITERATION = 64  # rows or numbers, each of which is traced by itself

# How traced arrays are printed, by which text that was made of one is found.
DESCRIPTION = "<traced array"

WAYS_OUT = {
    "strides": f"{UNKNOWN}; take windows by slices or np.lib.stride_tricks.sliding_window_view",
    **dict.fromkeys(("base", "data", "ctypes"), f"{UNKNOWN}; call it outside of the fused function"),
    **dict.fromkeys(
        ("as_integer_ratio", "bit_count", "bit_length", "hex", "numerator", "denominator", "to_bytes"),
        "values are not known while the function is traced; return the number, and call it outside",
    ),
    **dict.fromkeys(
        ("byteswap", "dump", "dumps", "tobytes", "tofile"),
        "bytes of traced arrays cannot be read; call it outside of the fused function",
    ),
    "resize": "arrays keep their size; make another one by np.resize(x, shape)",
}
_OTHERS = "it is not supported in a fused function; call it outside, or use NumPy's functions of the array"


class NamedConstant(float):
    """A float constant with a name: a parameter of the kernels, which therefore do not depend on its value."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, value: float, name: str) -> NamedConstant:
        self = super().__new__(cls, value)
        self.name = name
        return self


class TracedValue:
    """A node with the axes of the user's array, and the attributes that are known while tracing."""

    __slots__ = ("_axes", "_node", "_trace")
    _is_scalar: Any
    _origin: Any
    _parent: Any
    _strides: Any
    _node: g.Node
    _axes: Axes
    _trace: Any

    # Known while tracing
    @property
    def shape(self) -> tuple[int, ...]:
        return self._axes.shape

    @property
    def ndim(self) -> int:
        return len(self._axes.shape)

    @property
    def size(self) -> int:
        return self._node.size

    @property
    def dtype(self) -> Any:
        return dtypes.to_numpy(self._node.dtype)

    @property
    def itemsize(self) -> int:
        return dtypes.ITEMSIZE[self._node.dtype]

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def flags(self) -> Flags:
        return Flags(self)

    @property
    def device(self) -> str:
        """The device, for the array API standard; arrays are created on that of the arguments, whatever it says."""
        return "cpu"

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{DESCRIPTION}, shape {self.shape}, {self._node.dtype}>"

    # Errors: these need values
    def __bool__(self) -> NoReturn:
        if self.size != 1:
            found = "an array with more than one element" if self.size else "an empty array"
            raise ValueError(f"The truth value of {found} is ambiguous. Use a.any() or a.all()\n  at {user_line()}")
        fail(
            "a Python branch on an array's values",
            "they are not known while the function is traced; choose with np.where(condition, a, b), or branch on "
            "shapes, dtypes and plain Python arguments",
        )

    def __hash__(self) -> int:
        if not self._is_scalar:
            raise TypeError(f"unhashable type: 'numpy.ndarray'\n  at {user_line()}")
        fail(
            "a number computed from arrays as a key, or in a set",
            "values are not known while the function is traced; use a list, or a dict with other keys",
        )

    def __contains__(self, value: Any) -> NoReturn:
        fail(
            "a search of an array by `in`",
            "values are not known while the function is traced; (x == value).any() is an array that can be returned",
        )

    def __format__(self, form: str) -> str:
        if form and not self._is_scalar:
            raise TypeError(f"unsupported format string passed to numpy.ndarray.__format__\n  at {user_line()}")
        if form:
            format(self.__class__(), form)  # which raises for what is none of the type's
        return str(self)

    def _needs_value(self, *_: Any, **__: Any) -> NoReturn:
        fail(
            "a conversion of a traced array to a Python or NumPy value",
            "values are not known while the function is traced; use NumPy or cupyfuse functions on the array itself, "
            ".item() for a Python number that is computed with or returned, and return what is to be printed",
        )

    def __index__(self) -> NoReturn:
        fail(*NEEDED_INTEGER.split(": ", 1))

    __float__ = __int__ = __complex__ = __dlpack__ = _needs_value

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        fail(
            "a conversion of a traced array to a Python or NumPy value",
            "values are not known while the function is traced; use NumPy or cupyfuse functions on the array itself, "
            "convert it with .astype, make an array of a list of arrays by np.stack([...]), and fill a copy by "
            "np.array(a) of an array that NumPy's functions did not make, as of random numbers",
        )

    def _knows_strides(self) -> bool:
        """Whether strides are those of NumPy's array: along axes of one element views and copies may have any."""
        is_argument = self._parent is None and self._origin is not None
        return not self.ndim or (self._strides is not None and (is_argument or min(self.shape) > 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "_node":
            fail(
                "a use of an array after a change in place of a reshaped one",
                "NumPy changes one or both, as they lie in memory; reshape a copy, or write y = y + 1 for y += 1",
            )
        if name in METHODS:
            return functools.partial(self._trace.call_method, name, self)
        if name == "strides" and self._knows_strides():
            return self._strides or ()
        is_numpys = hasattr(np.ndarray, name) or name in WAYS_OUT
        reason = WAYS_OUT.get(name, _OTHERS) if is_numpys else "NumPy's arrays have none of this name"
        raise TraceAttributeError(f"cannot fuse the array attribute or method .{name}: {reason}\n  at {user_line()}")
