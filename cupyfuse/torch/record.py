"""What a module's forward asks PyTorch for, operation by operation: the form of a record; `recorder` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .chain import references


class Refused(Exception):
    """A forward cannot be recorded.

    Attributes
    ----------
    path : str
        The module in whose forward the reason lies.
    """

    def __init__(self, path: str, reason: str):
        super().__init__(reason)
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Source:
    """Where a tensor that is no argument is found at every call: an entry of one of a module's dictionaries."""

    table: dict[str, Any]
    key: str
    name: str
    fixed: bool

    def fetch(self) -> Any:
        return self.table[self.key]


@dataclass(frozen=True)
class Meta:
    """What is known of a value; `storage` is equal for values that share memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Submodule:
    """A submodule that is called as it is."""

    path: str


@dataclass
class Operation:
    """One operation of a record.

    Attributes
    ----------
    target : callable, a tensor's method by name, or a `Submodule`
    args, kwargs : with `Ref` in the places of tensors
    result : what it returns, with `Ref` in the places of tensors
    rule : str
        The name of a rule of `rules.RULES` that says what it is where the target alone does not; with `arguments`.
    written : numbers of the values that it changes in place
    ordered : whether it has to stay between its neighbours that are ordered too: it draws random numbers, say
    path : of the module in whose forward it is
    view : whether a result shares memory with an operand
    renewed : (value, value after it) for those that it changes in place and that later operations read
    barrier : whether it changes the meaning of what follows, such as the grad mode: nothing passes it
    after : numbers of operations that it needs for other things than tensors
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    path: str
    rule: str = ""
    arguments: tuple[Any, ...] = ()
    written: frozenset[int] = frozenset()
    ordered: bool = False
    view: bool = False
    renewed: tuple[tuple[int, int], ...] = ()
    barrier: bool = False
    after: frozenset[int] = frozenset()

    @property
    def read(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(references((self.args, self.kwargs, self.arguments))))

    @property
    def name(self) -> str:
        if isinstance(self.target, Submodule):
            return self.rule or self.target.path
        return self.rule or str(getattr(self.target, "__name__", self.target))

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(references(self.result))


@dataclass
class Record:
    """What one forward did.

    Attributes
    ----------
    tensors : for each value a `Meta`, or a fake tensor
    arguments : the numbers of the values that are the forward's arguments, in the order of its flattened arguments
    sources : where other values come from: number -> Source, or a tensor that is held here
    operations : in the order in which they ran
    result : what was returned, with `Ref` for tensors
    inlined : paths and modules whose forwards are part of the record
    autocast : whether PyTorch chose the dtypes of operations
    rebinds : whether what changes a value in place may be taken as what makes a new one
    """

    tensors: list[Any] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    sources: dict[int, Any] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    result: Any = None
    inlined: dict[str, torch.nn.Module] = field(default_factory=dict)
    autocast: bool = False
    rebinds: bool = True


def storage_of(tensor: Any) -> int:
    """A number that tensors share if they share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


_DRAWING = ("rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_", "rrelu")


def draws(name: str) -> bool:
    """Whether an operation of that name takes random numbers, whose order matters."""
    return name in ("normal", "poisson", "binomial") or any(word in name for word in _DRAWING)


# What is updated in training without a new version, where no batches are counted.
STATISTICS = ("running_mean", "running_var")


def sources_of(module: torch.nn.Module) -> dict[int, Source]:
    """Every tensor of a module tree by identity: parameters, buffers, and plain attributes (as replicas have them)."""
    found: dict[int, Source] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (part._parameters, part._buffers, part.__dict__):
            uncounted = STATISTICS if part._buffers.get("num_batches_tracked") is None else ()
            for key, value in table.items():
                if isinstance(value, torch.Tensor):
                    fixed = key not in uncounted
                    found.setdefault(id(value), Source(table, key, f"{prefix}{key}", fixed))
    return found


def shares_memory(module: torch.nn.Module, tensors: Sequence[Any]) -> bool:
    """Whether any of the tensors is in the memory of one of the module's."""
    own = {storage_of(source.fetch()) for source in sources_of(module).values()}
    return any(storage_of(t) in own for t in tensors)
