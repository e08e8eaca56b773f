"""`Arithmetic`: Python's operators on traced arrays, and in-place ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .python_numbers import METHODS_OF_NUMBERS, python_operator
from .user_code import fail
from .value import TracedValue

_FULL_LIKE = np.full_like  # another stands for it in the module `numpy` while a trace runs


class Arithmetic(TracedValue):
    """A traced value with Python's operators; `Tracer` implements the change of in-place ones."""

    __slots__ = ()
    __hash__ = TracedValue.__hash__  # beside `__eq__`

    def __getattr__(self, name: str) -> Any:
        if name in METHODS_OF_NUMBERS and hasattr(self.__class__, name):
            return functools.partial(METHODS_OF_NUMBERS[name], self)
        return super().__getattr__(name)

    def __add__(self, other: Any) -> Any:
        return self._trace.apply("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._trace.apply("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._trace.apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._trace.apply("subtract", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._trace.apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._trace.apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._trace.apply("divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._trace.apply("divide", other, self)

    def __pow__(self, other: Any) -> Any:
        if self._node.dtype == "bool" and type(other) is int and other == 2:
            return np.square(self)  # int8, where np.power gives int64
        if self.dtype.kind == "c" and type(other) in (int, float) and (type(other), other) in _COMPLEX_POWERS:
            return _COMPLEX_POWERS[type(other), other](self)
        return self._trace.power(self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._trace.power(other, self)

    def __matmul__(self, other: Any) -> Any:
        return self._trace.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._trace.matmul(other, self)

    def __neg__(self) -> Any:
        return self._trace.apply("negative", self)

    def __pos__(self) -> Any:
        if self._node.dtype == "bool":
            fail("positive of masks (bool arrays)", "NumPy refuses it as well; a copy is .copy()")
        return self._as_result()

    def __abs__(self) -> Any:
        return self._trace.apply("absolute", self)

    def __gt__(self, other: Any) -> Any:
        return self._trace.apply("greater", self, other)

    def __ge__(self, other: Any) -> Any:
        return self._trace.apply("greater_equal", self, other)

    def __lt__(self, other: Any) -> Any:
        return self._trace.apply("less", self, other)

    def __le__(self, other: Any) -> Any:
        return self._trace.apply("less_equal", self, other)

    def __eq__(self, other: Any) -> Any:
        if other is None or type(other) is str:
            return self._uniform_outcome(other, False)
        return self._trace.apply("equal", self, other)

    def __ne__(self, other: Any) -> Any:
        if other is None or type(other) is str:
            return self._uniform_outcome(other, True)
        return self._trace.apply("not_equal", self, other)

    def _uniform_outcome(self, other: Any, outcome: bool) -> Any:
        """Return the outcome of a comparison with None or a text, which no number equals, for each element."""
        if other is None and self._is_scalar:
            return outcome
        made = self._trace.call_function(_FULL_LIKE, (self, outcome), {"dtype": bool})
        return made if self.ndim else made._as_result()

    def __and__(self, other: Any) -> Any:
        return self._trace.apply("bitwise_and", self, other)

    def __or__(self, other: Any) -> Any:
        return self._trace.apply("bitwise_or", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Any:
        return self._trace.apply("invert", self)

    def __mod__(self, other: Any) -> Any:
        return self._trace.apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._trace.apply("remainder", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._trace.apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._trace.apply("floor_divide", other, self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __xor__(self, other: Any) -> Any:
        return self._trace.apply("bitwise_xor", self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Any:
        return self._trace.apply("left_shift", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self._trace.apply("left_shift", other, self)

    def __rshift__(self, other: Any) -> Any:
        return self._trace.apply("right_shift", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return self._trace.apply("right_shift", other, self)

    # In place
    def _updated(self, value: Any) -> Any:
        """Return the result of an in-place operator, given the value it computes."""
        raise NotImplementedError

    def __iadd__(self, other: Any) -> Any:
        return self._updated(self + other)

    def __isub__(self, other: Any) -> Any:
        return self._updated(self - other)

    def __imul__(self, other: Any) -> Any:
        return self._updated(self * other)

    def __itruediv__(self, other: Any) -> Any:
        return self._updated(self / other)

    def __ipow__(self, other: Any) -> Any:
        return self._updated(self**other)

    def __iand__(self, other: Any) -> Any:
        return self._updated(self & other)

    def __ior__(self, other: Any) -> Any:
        return self._updated(self | other)

    def __imod__(self, other: Any) -> Any:
        return self._updated(self % other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self._updated(self // other)

    def __ixor__(self, other: Any) -> Any:
        return self._updated(self ^ other)

    def __ilshift__(self, other: Any) -> Any:
        return self._updated(self << other)

    def __irshift__(self, other: Any) -> Any:
        return self._updated(self >> other)

    def __imatmul__(self, other: Any) -> Any:
        return self._updated(self @ other)


def has_protocol(kind: type) -> bool:
    """Whether ufuncs on operands of a type are the type's to compute, by `__array_ufunc__`, or none takes them.

    Types that can be converted to arrays are not meant: those of other libraries know no traced ones.
    """
    if getattr(kind, "__array_ufunc__", True) is None or getattr(kind, "_takes_over", False):
        return True
    return hasattr(kind, "__array_ufunc__") and not _is_convertible(kind)


def takes_over(kind: type) -> bool:
    """Whether operators on operands of a type are its own methods': by NumPy's protocols, or by ours."""
    if hasattr(kind, "__array_ufunc__") or getattr(kind, "_takes_over", False):
        return has_protocol(kind)
    return not _is_convertible(kind) and getattr(kind, "__array_priority__", 0.0) > 0.0


def _is_convertible(kind: type) -> bool:
    """Whether objects of a type are arrays, can be converted to them, or are this package's."""
    own = kind.__module__.partition(".")[0] == "cupyfuse"
    return own or hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")


def _deferring(name: str, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator's method that leaves it to operands that take over: to their own, or to their ufunc."""
    ufunc = getattr(np, _UFUNCS.get(name, name))

    @functools.wraps(method)
    def call(self: Any, other: Any) -> Any:
        kind = type(other)
        if not takes_over(kind):
            return method(self, other)
        by_ufunc = getattr(kind, "__array_ufunc__", None) is not None and not getattr(kind, "_takes_over", False)
        return ufunc(self, other) if by_ufunc else NotImplemented

    return call


# By operator, where it has another name.
_UFUNCS = {"sub": "subtract", "mul": "multiply", "truediv": "true_divide", "pow": "power", "mod": "remainder"}
_UFUNCS |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "floordiv": "floor_divide"}
_UFUNCS |= {"lshift": "left_shift", "rshift": "right_shift", "gt": "greater", "ge": "greater_equal"}
_UFUNCS |= {"lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal"}
# What `**` computes of complex numbers, with other infinities than `np.power`; -1.0 is not among them.
_COMPLEX_POWERS: dict[tuple[type, float], Any] = {(kind, 2): np.square for kind in (int, float)}
_COMPLEX_POWERS |= {(float, 0.5): np.sqrt, (int, -1): np.reciprocal}
_BINARY = "add sub mul truediv pow matmul and or mod floordiv divmod xor lshift rshift gt ge lt le eq ne"
_REFLECTED = "radd rsub rmul rtruediv rpow rand ror rmod rfloordiv rxor rlshift rrshift"
for _name in _BINARY.split():
    setattr(Arithmetic, f"__{_name}__", _deferring(_name, getattr(Arithmetic, f"__{_name}__")))
_BETWEEN_NUMBERS = {*_BINARY.split(), *_REFLECTED.split(), "neg", "pos", "abs", "invert"} - {"matmul", "divmod"}
for _name in _BETWEEN_NUMBERS:  # divmod consists of two others
    setattr(Arithmetic, f"__{_name}__", python_operator(_name, getattr(Arithmetic, f"__{_name}__")))
