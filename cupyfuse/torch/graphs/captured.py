"""A captured graph as data: its values, its operations in order, and which inputs are parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..chains.eligibility import is_sharded
from ..chains.tensors import concrete_sizes
from ..rules.symbols import references


@dataclass
class Operation:
    """One operation of a captured graph.

    Attributes
    ----------
    target : callable, or a tensor's method by name; None for anything else
    args, kwargs : with `Ref` in the places of tensors, `Size` in those of symbolic sizes
    result : what it returns, likewise
    path : dotted name of the module in whose forward it is
    written : numbers of the values that it changes in place
    ordered : whether it keeps its order among ordered operations, as those that draw random numbers do
    view : whether a result shares memory with an operand
    barrier : whether no operation may move past it, as past a change of the grad mode
    random : whether it draws random numbers
    depends_on : numbers of the operations that produce its inputs, sizes included
    refusal : why it is left to PyTorch even if there is a rule for it; empty otherwise
    reordered : the name of the node for whose sake a rewrite reordered this operation or inserted this view; empty
        otherwise
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
    random: bool = False
    depends_on: frozenset[int] = frozenset()
    refusal: str = ""
    reordered: str = ""

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The numbers of its operands."""
        return tuple(dict.fromkeys(references((self.args, self.kwargs))))

    @property
    def name(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    @cached_property
    def results(self) -> tuple[int, ...]:
        """The numbers of its results."""
        return tuple(references(self.result))


@dataclass
class CapturedGraph:
    """The values and operations of one captured forward; a value is a number, its index in `tensors`.

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

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of all inputs."""
        return (*self.arguments, *self.parameters)

    @cached_property
    def inserted_views(self) -> dict[int, Operation]:
        """The views that rewrites inserted to reorder other operations, by number; of the whole graph."""
        return {k: o for k, o in enumerate(self.operations) if o.reordered and o.view}


def storage_of(tensor: Any) -> int:
    """Identify a tensor's memory by a number; that of a DTensor is its part's."""
    if is_sharded(tensor):
        tensor = tensor._local_tensor
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def is_dense(tensor: Any, order: Sequence[int]) -> bool:
    """Whether each stride is the product of the sizes inside of it, provably where sizes are symbolic."""
    expected: Any = 1
    for k in reversed(order):
        size, stride = tensor.shape[k], tensor.stride(k)
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def order_in_memory(tensor: Any) -> list[int] | None:
    """Order a dense tensor's dimensions by stride, outermost first; [] for C order, None for gaps or overlaps."""
    c_order = list(range(tensor.dim()))
    if is_dense(tensor, c_order):
        return []
    strides = concrete_sizes(tensor.stride())
    by_stride = sorted(c_order, key=lambda k: -strides[k])
    return by_stride if is_dense(tensor, by_stride) else None


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the dimensions of an image in the order of memory, its channels last."""
    return (0, *range(2, rank), 1)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes another one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def is_in_a_format(tensor: Any) -> bool:
    """Whether a tensor is dense in one of PyTorch's memory formats, provably where sizes are symbolic.

    These are C order and, of four or five dimensions, channels last.
    """
    rank = tensor.dim()
    return is_dense(tensor, range(rank)) or (rank in (4, 5) and is_dense(tensor, channels_last(rank)))


def keeps_placement(operation: Operation, tensors: Sequence[Any]) -> bool:
    """Whether an operation redistributes a DTensor as it is distributed already."""
    if not operation.name.endswith("redistribute") or len(operation.read) != 1 or len(operation.results) != 1:
        return False
    before, after = tensors[operation.read[0]], tensors[operation.results[0]]
    if not (is_sharded(before) and is_sharded(after)) or before.dtype != after.dtype:
        return False
    return bool(before.device_mesh == after.device_mesh and before.placements == after.placements)
