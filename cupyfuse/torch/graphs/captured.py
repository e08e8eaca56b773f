"""A captured graph as data: its values, its operations in order, and which inputs are parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..rules.symbols import references


@dataclass
class Operation:
    """One operation of a captured graph.

    Attributes
    ----------
    target : callable, or a tensor's method by name; None for anything else
    args, kwargs : with `Ref` in the places of tensors, `Size` in those of symbolic sizes
    result : what it returns, likewise
    path : of the module in whose forward it is
    written : numbers of the values that it changes in place
    ordered : whether it keeps its order among ordered operations, as those that draw random numbers do
    view : whether a result shares memory with an operand
    barrier : whether nothing may move past it, as past a change of the grad mode
    drawn : whether it draws random numbers
    after : numbers of the operations that produce its inputs, sizes included
    left : why it is left to PyTorch whatever rule there is for it; empty if it is not
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    path: str = ""
    written: frozenset[int] = frozenset()
    ordered: bool = False
    view: bool = False
    barrier: bool = False
    drawn: bool = False
    after: frozenset[int] = frozenset()
    left: str = ""

    @cached_property
    def read(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(references((self.args, self.kwargs))))

    @property
    def name(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    @cached_property
    def results(self) -> tuple[int, ...]:
        return tuple(references(self.result))


@dataclass
class CapturedGraph:
    """The values and operations of one captured forward.

    Attributes
    ----------
    tensors : for each value, a fake tensor
    arguments : numbers of the inputs that are no parameters
    parameters : numbers of the inputs that are a module's parameters or buffers, with their dotted names
    operations : in the order of their calls
    result : what is returned, with `Ref` for tensors
    autocast : whether PyTorch chose the dtypes of operations
    """

    tensors: list[Any] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    result: Any = None
    autocast: bool = False


def storage_of(tensor: Any) -> int:
    """A number that tensors share if they share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
