"""Traced numbers: float and integer arguments of a fused function, whose calls share a plan for many values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ir import graph as g
from ..ir.numbers import Number, function_of_numbers
from .numbers_of_call import ERRORS, NumbersOfCall
from .tracer import Tracer
from .value import NUMPY_INTEGERS, NUMPY_NUMBERS

_NUMBERS = (int, float, bool, *NUMPY_NUMBERS)
_EXACT_AS_FLOAT = 2**53  # the largest integer such that all below are floats, too
_DIVISIONS = ("truediv", "mod", "floordiv")
_NO_NUMBERS = (str, bytes, type(None), tuple, list, dict, set, frozenset)  # which equal no number
_LONGEST = 128  # size of an expression that each call computes; the value of a longer one is read


class TracedNumber:
    """A number to the user's code, and a parameter of the kernels.

    Arithmetic with Python's real numbers gives another traced number, computed in each call. The plan serves calls
    alone whose comparisons turn out the same. Every other use reads the value, for which alone the plan is then.
    """

    __slots__ = ("_call", "_number", "_trace", "name")

    _type: Any

    def __new__(cls, *args: Any) -> Any:
        # Code that calls the type of a number, as in `type(k)(2)`, has the class, since there is no other to be given.
        return super().__new__(cls) if args and type(args[0]) is Number else cls._type(*args)

    def __init__(self, number: Number, name: str, call: NumbersOfCall, trace: Any):
        self._number, self.name, self._call, self._trace = number, name, call, trace

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._type

    @property
    def number(self) -> Number:
        """What computes it in each call."""
        return self._number

    @property
    def value(self) -> Any:
        """The value in the traced call, which the plan does not depend on."""
        return self._number.evaluate(self._call.values)

    def read(self) -> Any:
        """Return the value in the traced call, for which alone the plan is then."""
        return self._number.read()

    def in_array(self) -> Any:
        """Return what stands for the number in an array that is made of it: a traced scalar, or the value."""
        found = self.beside_array()
        if type(found) is not Tracer:
            return found
        return self._trace.array(g.cast(found._node, found._node.dtype), ())  # no longer weak in promotion

    def beside_array(self) -> Any:
        """Return what stands for the number where it meets an array: a traced scalar, as weak as it, or the value."""
        self._call.makes_arrays = True
        return self._trace.tracer_of(self) if self._call.arrays else self.read()

    def computed(self, name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Return what a function gives for numbers, this one among them: a traced number, or the outcome of a test."""
        if not all(_is_number(o) for o in operands):
            return function(*map(_value_of, operands))
        numbers = [_number_of(o) for o in operands]
        kind = self._call.type_of(name, function, numbers)
        number = function_of_numbers(name, function, numbers, kind)
        return self._call.holds(number) if kind is bool else self.result(number, kind)

    def result(self, number: Number, kind: type) -> Any:
        """Return a traced number of a type that was computed of this one; the value, of a long expression.

        The text of `a, b = b, a + b` doubles each few times, and the depth of sums in a loop is that of recursion.
        """
        if number.size > _LONGEST:
            return number.read()
        return _CLASSES[kind](number, self.name, self._call, self._trace)

    def of_numpys(self, name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Return what NumPy gives for numbers, some its own: a traced number, or the outcome of a test; else None.

        The type of the result depends on theirs; for integers, values decide whether the function raises.
        """
        quiet, numbers = _quiet(function), [_number_of(o) for o in operands]
        if any(issubclass(o.__class__, (int, np.integer)) for o in operands if isinstance(o, TracedNumber)):
            kind = self._call.type_of(name, quiet, numbers)
        else:
            kind = type(quiet(*[o.value if isinstance(o, TracedNumber) else o for o in operands]))
        if kind not in (np.bool_, *NUMPY_NUMBERS):
            return None
        number = function_of_numbers(name, quiet, numbers, kind)
        return np.bool_(self._call.holds(number)) if kind is np.bool_ else self.result(number, kind)

    def of_function(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Return what a function of NumPy's gives for numbers in each call; None if that is no number of NumPy's."""
        if not all(_is_number(o) for o in operands):
            return None
        try:
            found = _quiet(function)(*[o.value if isinstance(o, TracedNumber) else o for o in operands])
        except ERRORS:
            # What a ufunc raises for integers becomes a condition of the plan; other functions are left to NumPy.
            if not isinstance(function, np.ufunc):
                return None
        else:
            if type(found) not in (np.bool_, *NUMPY_NUMBERS):
                return None
        return self.of_numpys(f"np.{function.__name__}", function, operands)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TYPE:
            return getattr(self._type(), name)
        if name in _COMPUTED and hasattr(self._type, name):
            return lambda: self.computed(f"{self._type.__name__}.{name}", operator.methodcaller(name), [self])
        if name in ("real", "imag"):
            return self if name == "real" else self._type()
        return getattr(self.read(), name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.read(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(type(i) is Tracer for i in inputs):
            return NotImplemented  # Tracer.__array_ufunc__ takes the call
        if any(isinstance(i, np.ndarray) for i in inputs) and not options:
            inputs = tuple(i.beside_array() if isinstance(i, TracedNumber) else i for i in inputs)
            if any(type(i) is Tracer for i in inputs):
                return getattr(ufunc, method)(*inputs)
        is_numpys = getattr(np, ufunc.__name__, None) == ufunc
        if is_numpys and method == "__call__" and not options:
            result = self.of_function(ufunc, inputs)
            if result is not None:
                return result
        return getattr(ufunc, method)(*map(_value_of, inputs), **options)

    def __reduce__(self) -> Any:
        return self._type, (self.read(),)

    def __round__(self, ndigits: Any = None) -> Any:
        return self.computed("round", round, [self] if ndigits is None else [self, ndigits])

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self) -> bool:
        return self._call.holds(function_of_numbers("bool", bool, (self._number,), bool))


class TracedFloat(TracedNumber):
    """A float to the user's code."""

    __slots__ = ()
    _type = float


class TracedScalar(TracedNumber):
    """A number of NumPy's to the user's code, as its functions of numbers give."""

    __slots__ = ()

    def as_float(self) -> Any:
        """Return the number as a float, which a cast to its dtype makes it again; None for integers beyond 2**53.

        Which of the two it is becomes a condition of the plan.
        """
        number: Any = self
        if self._type is np.int64 and not -_EXACT_AS_FLOAT <= number <= _EXACT_AS_FLOAT:
            return None
        return self.result(function_of_numbers("float", float, (self._number,)), float)


class TracedInteger(TracedNumber):
    """An integer to the user's code: a parameter of the kernels only where it meets arrays of floats."""

    __slots__ = ()
    _type = int

    def beside_array(self) -> Any:
        return self.read()

    def as_float(self) -> Any:
        """Return it as a float, which arrays of floats take as they take integers."""
        _check_float(self)
        return self.result(function_of_numbers("float", float, (self._number,)), float)


def _class_of(kind: type) -> type[TracedNumber]:
    """Return the class of traced numbers that are of one of NumPy's types."""
    return type(f"Traced_{kind.__name__}", (TracedScalar,), {"__slots__": (), "_type": kind})


_CLASSES: dict[type, type[TracedNumber]] = {int: TracedInteger, float: TracedFloat}
_CLASSES |= {kind: _class_of(kind) for kind in NUMPY_NUMBERS}
_COMPUTED = ("item", "is_integer", "conjugate", "conj", "bit_count", "bit_length")  # methods that give numbers
_OF_TYPE = ("dtype", "shape", "ndim", "size", "itemsize", "nbytes")  # attributes that numbers of a type share


def traced_number(call: NumbersOfCall, position: int, name: str, trace: Any) -> Any:
    """Return what stands for the number at a position of a call while the function is traced."""
    number = call.number(position)
    return _CLASSES[type(call.values[position])](number, name, call, trace) if isinstance(number, Number) else number


def _check_float(operand: Any) -> None:
    """Raise OverflowError if an integer, which floats beside it take as a float, is too large for one in this call.

    Other calls of the plan are such where it is not.
    """
    if isinstance(operand, TracedInteger):
        operand._call.type_of("float", float, (operand.number,))
    elif type(operand) is int:
        float(operand)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of NumPy's numbers without its warnings, as plans have none."""

    def quiet(*values: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*values)

    return quiet


def _value_of(operand: Any) -> Any:
    """Return the value of a traced number; anything else as it is."""
    return operand.read() if isinstance(operand, TracedNumber) else operand


def _is_number(operand: Any) -> bool:
    """Whether an operand is a traced number, or one of a type that may be traced."""
    return isinstance(operand, TracedNumber) or type(operand) in _NUMBERS


def _is_numpys(operand: Any) -> bool:
    """Whether a number is NumPy's, traced or not."""
    return operand.__class__ in NUMPY_NUMBERS


def _number_of(operand: Any) -> Number | float:
    return operand._number if isinstance(operand, TracedNumber) else operand


def _type_of(operand: Any) -> type:
    """Return whether a number is a float or an integer."""
    return float if operand.__class__ is float else int


def _kind_of_result(name: str, left: Any, right: Any) -> type | None:
    """Return the type of a binary operator's result; None if that, or whether it raises, depends on the values."""
    has_float = float in (_type_of(left), _type_of(right))
    if name == "truediv" and not has_float:
        return None  # the quotient may be too large for a float
    if name != "pow":
        return float if has_float else int
    is_integer = not has_float and not isinstance(right, TracedNumber) and right >= 0
    return int if is_integer else None  # else it may be complex, or too large for a float


def _takes_over(operand: Any) -> bool:
    """Whether an operand that is no number computes with traced numbers itself: arrays, traced or not."""
    return hasattr(type(operand), "__array_ufunc__")


def _arithmetic(name: str, swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    """Return a binary operator's method, or its reflected one, which computes with traced numbers."""
    function = getattr(operator, name)

    def method(self: TracedNumber, other: Any) -> Any:
        left, right = (other, self) if swapped else (self, other)
        if not _is_number(other):
            return NotImplemented if _takes_over(other) else function(_value_of(left), _value_of(right))
        operands = (_number_of(left), _number_of(right))
        if _is_numpys(left) or _is_numpys(right):
            result = self.of_numpys(name, function, (left, right))
            return function(_value_of(left), _value_of(right)) if result is None else result
        if isinstance(left, float) or isinstance(right, float):
            for operand in (left, right):
                _check_float(operand)
        if name in _DIVISIONS:
            self._call.check_divisor(operands[1])
        kind = _kind_of_result(name, left, right) or self._call.type_of(name, function, operands)
        if kind is complex:
            return function(_value_of(left), _value_of(right))
        return self.result(function_of_numbers(name, function, operands, kind), kind)

    return method


def _unary_arithmetic(name: str) -> Callable[[TracedNumber], Any]:
    """Return a unary operator's method, which computes with traced numbers."""
    function = _quiet(getattr(operator, name))
    return lambda self: self.result(function_of_numbers(name, function, (self._number,), self._type), self._type)


def _comparison(name: str) -> Callable[[TracedNumber, Any], Any]:
    """Return a comparison's method, whose outcome the plan depends on."""
    function = getattr(operator, name)

    def method(self: TracedNumber, other: Any) -> Any:
        if _is_number(other):
            operands = self._number, _number_of(other)
            if not _is_numpys(self) and not _is_numpys(other):
                return self._call.holds(function_of_numbers(name, function, operands, bool))
            return np.bool_(self._call.holds(function_of_numbers(name, function, operands, np.bool_)))
        if _takes_over(other) or type(other) in _NO_NUMBERS:
            return NotImplemented
        return function(self.read(), other)  # such as a member of an `IntEnum`

    return method


def _binary_reading(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    """Return the method, or the reflected one, of a binary operator that reads the values of numbers."""

    def method(self: TracedNumber, other: Any) -> Any:
        left, right = (other, self) if swapped else (self, other)
        return NotImplemented if _takes_over(other) else function(_value_of(left), _value_of(right))

    return method


def _method_of(name: str) -> Callable[..., Any]:
    """Return a method that calls the value's own."""
    return lambda self, *others: getattr(self.read(), name)(*map(_value_of, others))


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(TracedNumber, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(TracedNumber, f"__r{_name}__", _arithmetic(_name, swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedNumber, f"__{_name}__", _unary_arithmetic(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparison(_name))
for _name in ("int", "float", "trunc", "floor", "ceil", "hash", "repr", "str", "format"):
    setattr(TracedNumber, f"__{_name}__", _method_of(f"__{_name}__"))
_INTEGERS = [TracedInteger, *(_CLASSES[kind] for kind in NUMPY_INTEGERS)]
for _class in _INTEGERS:
    for _name in ("index", "invert"):
        setattr(_class, f"__{_name}__", _method_of(f"__{_name}__"))
    for _name in ("and_", "or_", "xor", "lshift", "rshift"):
        for _swapped in (False, True):
            _label = f"__{'r' if _swapped else ''}{_name.rstrip('_')}__"
            setattr(_class, _label, _binary_reading(getattr(operator, _name), _swapped))
