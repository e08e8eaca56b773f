"""What captured code was traced from that Dynamo does not guard: methods of modules' classes, hooks of all modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch

from ..generated import Constants, define

_HOOKS = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]


class TracedMethods:
    """The methods of a module's classes, and of its submodules', whose code was traced, and the hooks of all modules.

    Attributes
    ----------
    unchanged : callable
        Whether each class still has a method of that code, its own or an inherited one, and the hooks are the same.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[type, str], CodeType] = {}
        self.unchanged: Callable[[], bool] = lambda: True

    def add(self, module: torch.nn.Module, traced: Iterable[CodeType]) -> None:
        """Add those whose code is among the traced ones."""
        codes = set(traced)
        for cls in {type(part) for part in module.modules()}:
            for name in {name for base in _own_bases(cls) for name in vars(base) if name.isidentifier()}:
                function = inspect.getattr_static(cls, name)
                if isinstance(function, FunctionType) and function.__code__ in codes:
                    self._codes[cls, name] = function.__code__
        constants, same = Constants(), []
        for (cls, name), code in self._codes.items():
            same.append(f"{constants.name(cls)}.{name}.__code__ is {constants.name(code)}")
        same += [f"[*{constants.name(hooks)}] == {[*hooks]}" for hooks in _HOOKS]
        lines = ["try:", f"    return {' and '.join(same)}", "except AttributeError:", "    return False"]
        self.unchanged = define("unchanged", "", lines, constants)


def _own_bases(cls: Any) -> Iterable[type]:
    """Return a class and those of its bases that define more than every module has."""
    return [base for base in cls.__mro__ if not issubclass(torch.nn.Module, base)]
