"""The parameters of a function, and the values that a call gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from ..generated import define

_NO_NAMES: frozenset[str] = frozenset()
_ABSENT = object()
_MOST_FORMS = 32  # in which one function's arguments are passed
_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_VAR_POSITIONAL, _KEYWORD_ONLY, _VAR_KEYWORD = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)

# The value of each parameter; the names of those to which a call gives nothing.
Binding = tuple[Sequence[Any], frozenset[str]]


def _declaring(function: Any) -> Any:
    """Return the function whose parameters a function takes: that within wrappers that pass on what they are given.

    `functools.wraps` makes every wrapper look like the function that it wraps. Those which pass arguments on take
    `*args, **kwargs`, perhaps behind some first parameters of that function, by the same names and with no defaults of
    their own; others have parameters of their own.
    """
    if isinstance(function, MethodType):
        return MethodType(_declaring(function.__func__), function.__self__)
    while hasattr(function, "__wrapped__") and "__signature__" not in getattr(function, "__dict__", ()):
        if isinstance(function, FunctionType):
            own, wrapped = _parameters(function), function.__wrapped__  # type: ignore[attr-defined]
            first = own[:-2]
            within = _parameters(wrapped, True)[: len(first)]
            if [p.kind for p in own[-2:]] != [_VAR_POSITIONAL, _VAR_KEYWORD]:
                break
            if [p.name for p in first] != [p.name for p in within] or any(p.default is not p.empty for p in first):
                break
        function = function.__wrapped__
    return function


def _signature_of(function: Any) -> inspect.Signature:
    """Return a function's signature; of a ufunc that of its operands, since it refuses some defaults beside others."""
    if isinstance(function, np.ufunc):
        names = [f"x{k + 1}" for k in range(function.nin)] if function.nin > 1 else ["x"]
        return inspect.Signature([inspect.Parameter(name, _POSITIONAL_ONLY) for name in names])
    try:
        return inspect.signature(function, follow_wrapped=False)
    except ValueError as error:
        raise TypeError(f"fn: expected a function, but there is {error}; call it from a function of your own") from None


def _parameters(function: Any, follow_wrapped: bool = False) -> list[inspect.Parameter]:
    return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())


def _default_objects(function: Any) -> Iterator[Any]:
    """Yield the objects whose identities show whether defaults were replaced: values, names of keyword-only ones."""
    plain = _declaring(function)
    if isinstance(plain, functools.partial):
        yield from (*plain.keywords, *plain.keywords.values())
        yield from _default_objects(plain.func)
    elif isinstance(plain, MethodType):
        yield from _default_objects(plain.__func__)
    elif isinstance(plain, FunctionType):
        by_name = plain.__kwdefaults__ or {}
        yield from (*(plain.__defaults__ or ()), *by_name, *by_name.values())
    elif callable(plain) and isinstance(type(plain).__call__, FunctionType):
        yield from _default_objects(type(plain).__call__)


class Parameters:
    """The parameters of a function.

    Default values are those that the function has when it is called, as in Python: `function.__defaults__` may be
    replaced.

    Parameters
    ----------
    function : callable
    fixed : collection of str
        Parameters that calls do not give, and that are left out.

    Attributes
    ----------
    names : tuple of str
    positional : bool
        Whether all of them can be passed by position.
    signature : inspect.Signature
        Of the function, with all its parameters.
    """

    def __init__(self, function: Callable[..., Any], fixed: Collection[str] = ()):
        self._function, self._fixed = function, fixed
        self._read()
        self.names = tuple(p.name for p in self._parameters)
        # By how a call passes them: what puts the values of all parameters in their order, where no default is needed.
        self._orders: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]] = {}

    def _read(self) -> None:
        """Read the function's signature, and note the default values that it has now."""
        self.signature = _signature_of(_declaring(self._function))
        self._defaults = list(_default_objects(self._function))
        # Of a plain function without wrappers or keyword-only defaults one tuple tells whether they were replaced.
        function: Any = self._function
        is_plain = type(function) is FunctionType and not function.__dict__ and not function.__kwdefaults__
        self._plain = function if is_plain else None
        self._plain_defaults = function.__defaults__ if is_plain else None
        self._parameters = [p for p in self.signature.parameters.values() if p.name not in self._fixed]
        self.positional = all(p.kind in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD) for p in self._parameters)
        self._binder = _binder_of(self._parameters)
        # Fixed parameters that `**kwargs` would take where a call names them.
        named = [p.name for p in self.signature.parameters.values() if p.kind is not _POSITIONAL_ONLY]
        takes_any = any(p.kind is _VAR_KEYWORD for p in self._parameters)
        self._refused = frozenset(self._fixed).intersection(named if takes_any else ())
        self._defaults_by_mask: dict[int, tuple[frozenset[str], list[tuple[int, Any]]]] = {}  # by what is not given

    def _read_if_replaced(self) -> None:
        """Read the signature again if a default was replaced since."""
        plain = self._plain
        if (
            plain is not None
            and plain.__defaults__ is self._plain_defaults
            and not plain.__kwdefaults__
            and not plain.__dict__
        ):
            return
        now = list(_default_objects(self._function))
        if len(now) != len(self._defaults) or any(a is not b for a, b in zip(now, self._defaults, strict=True)):
            self._read()

    @property
    def plain_function(self) -> Any:
        """The function, if its `__defaults__` alone tell whether defaults were replaced; else None."""
        self._read_if_replaced()
        return self._plain

    def defaults(self) -> dict[str, Any]:
        """Return the default values by the names of their parameters."""
        self._read_if_replaced()
        return {p.name: p.default for p in self._parameters if p.default is not inspect.Parameter.empty}

    @property
    def by_place(self) -> tuple[str, ...]:
        """The names of the parameters that can be passed by position, but for `*args`."""
        return tuple(p.name for p in self._parameters if p.kind in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD))

    def free_signature(self) -> inspect.Signature:
        """Return the function's signature without the fixed parameters."""
        self._read_if_replaced()
        return self.signature.replace(parameters=self._parameters)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding | None:
        """Return the value of each parameter, and the names of those that take their defaults, or are empty.

        None if the arguments do not fit the parameters. Fixed parameters are left out.
        """
        if self.positional and not kwargs and len(args) == len(self.names):
            return args, _NO_NAMES
        form = (len(args), *kwargs)
        order = self._orders.get(form)
        if order is not None:
            return order(args, kwargs), _NO_NAMES
        self._read_if_replaced()
        if self._refused and not self._refused.isdisjoint(kwargs):
            return None
        try:
            values, mask = self._binder(*args, **kwargs)
        except TypeError:
            return None
        if not mask:
            if self.positional and len(self._orders) < _MOST_FORMS:
                self._orders[form] = _order_of(len(args), self.names)
            return values, _NO_NAMES
        if mask not in self._defaults_by_mask:
            self._defaults_by_mask[mask] = self._defaults_of(mask)
        names, defaults = self._defaults_by_mask[mask]
        filled = list(values)
        for position, value in defaults:
            filled[position] = value
        return filled, names

    def _defaults_of(self, mask: int) -> tuple[frozenset[str], list[tuple[int, Any]]]:
        """Return the names of the parameters that a call does not give, and the positions and values of defaults."""
        absent = [(k, p) for k, p in enumerate(self._parameters) if mask >> k & 1]
        defaults = [(k, p.default) for k, p in absent if p.kind not in (_VAR_POSITIONAL, _VAR_KEYWORD)]
        return frozenset(p.name for _, p in absent), defaults

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        """Return what `find` does; raise TypeError, as the function itself would, where arguments do not fit.

        For parameters none of which is fixed.
        """
        found = self.find(args, kwargs)
        if found is None:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                name = getattr(self._function, "__name__", type(self._function).__name__)
                raise TypeError(f"{name}() {error}") from None
            raise AssertionError
        return found

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call a function that has these parameters with the value of each."""
        if self.positional:
            return function(*values)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, value in zip(self._parameters, values, strict=True):
            if parameter.kind is _VAR_POSITIONAL:
                args += value
            elif parameter.kind is _VAR_KEYWORD:
                kwargs |= value
            elif parameter.kind is _KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return function(*args, **kwargs)


def _order_of(positional: int, names: Sequence[str]) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """Return a function that lists the values of parameters, so many passed by position, the rest by name."""
    values = [f"args[{k}]" if k < positional else f"kwargs[{name!r}]" for k, name in enumerate(names)]
    return define("order", "args, kwargs", [f"return ({''.join(f'{value}, ' for value in values)})"], {})


def _binder_of(parameters: Sequence[inspect.Parameter]) -> Callable[..., tuple[tuple[Any, ...], int]]:
    """Return a function of these parameters: their values, and a mask with a bit for each that a call gives nothing.

    Such a value is `_ABSENT`, or empty. The function is compiled so that Python itself binds the arguments, at the
    speed of a call; a misfit is a TypeError.
    """
    absent = "absent"
    while any(p.name == absent for p in parameters):
        absent += "_"
    bits = []
    for k, p in enumerate(parameters):
        if p.kind in (_VAR_POSITIONAL, _VAR_KEYWORD):
            bits.append(f"(not {p.name}) << {k}")
        elif p.default is not p.empty:
            bits.append(f"({p.name} is {absent}) << {k}")
    signature = inspect.Signature(
        [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else _Name(absent)) for p in parameters]
    )
    values = "".join(f"{p.name}, " for p in parameters)
    result = f"return ({values}), {' | '.join(bits) or '0'}"
    return define("binder", str(signature)[1:-1], [result], {absent: _ABSENT})


class _Name:
    """A default value that is written as a name."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name
