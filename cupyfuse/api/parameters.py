"""The parameters of a function, and the values that a call gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

_NO_NAMES: frozenset[str] = frozenset()
_EMPTY = inspect.Parameter.empty
_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_VAR_POSITIONAL, _KEYWORD_ONLY, _VAR_KEYWORD = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def _default_objects(function: Any) -> Iterator[Any]:
    """Yield the objects whose identities show whether defaults were replaced: values, and names of those by name."""
    plain = inspect.unwrap(function)
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

    Attributes
    ----------
    names : tuple of str
    positional : bool
        Whether all of them can be passed by position.
    signature : inspect.Signature
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._read()
        self.names = tuple(self.signature.parameters)

    def _read(self) -> None:
        """Read the function's signature, and note the default values that it has now."""
        self.signature = inspect.signature(self._function)
        self._defaults = list(_default_objects(self._function))
        self.positional = all(
            p.kind in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD) for p in self.signature.parameters.values()
        )
        self._kinds = [(p.name, p.kind, p.default) for p in self.signature.parameters.values()]
        # By the number of arguments that a call gives: the defaults of the others, and their names.
        self._defaults_after: dict[int, tuple[tuple[Any, ...], frozenset[str]]] = {}
        parameters = list(self.signature.parameters.values())
        for count in reversed(range(len(parameters))):
            if parameters[count].default is inspect.Parameter.empty:
                break
            rest = parameters[count:]
            self._defaults_after[count] = tuple(p.default for p in rest), frozenset(p.name for p in rest)

    def _read_if_replaced(self) -> None:
        now = list(_default_objects(self._function))
        if len(now) != len(self._defaults) or any(a is not b for a, b in zip(now, self._defaults, strict=True)):
            self._read()

    def defaults(self) -> dict[str, Any]:
        """Return the default values by the names of their parameters."""
        self._read_if_replaced()
        parameters = self.signature.parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], frozenset[str]]:
        """Return the value of each parameter, and the names of those that take their defaults."""
        if self.positional and not kwargs and len(args) == len(self.names):
            return args, _NO_NAMES
        self._read_if_replaced()
        if self.positional and not kwargs and len(args) in self._defaults_after:
            values, names = self._defaults_after[len(args)]
            return (*args, *values), names
        found = self._bind(args, kwargs)
        if found is None:
            self.signature.bind(*args, **kwargs)  # raises the error
            raise AssertionError
        return found

    def bind_rest(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], frozenset[str]] | None:
        """Return the value of each parameter, from `fixed` for those it names, and the names of those with defaults.

        None if the arguments do not fit the other parameters.
        """
        self._read_if_replaced()
        return self._bind(args, kwargs, fixed)

    def takes_by_position(self, names: Iterable[str]) -> bool:
        """Whether these parameters can be passed by position, one value for each."""
        kinds = {name: kind for name, kind, _ in self._kinds}
        return all(kinds[name] in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD) for name in names)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[tuple[Any, ...], frozenset[str]] | None:
        """Bind arguments to parameters of all kinds, with defaults filled in; None if they do not fit."""
        values: list[Any] = []
        defaulted: list[str] = []
        position, left = 0, dict(kwargs)
        for name, kind, default in self._kinds:
            if name in fixed:
                if name in left and kind is not _POSITIONAL_ONLY:
                    return None
                values.append(fixed[name])
                continue
            if kind is _VAR_POSITIONAL:
                value: Any = args[position:]
                position = len(args)
            elif kind is _VAR_KEYWORD:
                value, left = left, {}
            elif position < len(args) and kind is not _KEYWORD_ONLY:
                if kind is _POSITIONAL_OR_KEYWORD and name in left:
                    return None
                value = args[position]
                position += 1
            elif name in left and kind is not _POSITIONAL_ONLY:
                value = left.pop(name)
            else:
                value = default
                defaulted.append(name)
                if default is _EMPTY:
                    return None
            if (kind is _VAR_POSITIONAL or kind is _VAR_KEYWORD) and not value:
                defaulted.append(name)
            values.append(value)
        return None if left or position < len(args) else (tuple(values), frozenset(defaulted))

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call a function that has these parameters with the value of each."""
        if self.positional:
            return function(*values)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for (name, kind, _), value in zip(self._kinds, values, strict=True):
            if kind is _VAR_POSITIONAL:
                args += value
            elif kind is _VAR_KEYWORD:
                kwargs |= value
            elif kind is _KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
        return function(*args, **kwargs)
