"""Convert PyTorch's tensors for the engines: dtypes, layouts, memory, and CPU tensors to NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ... import dtypes
from ...api.arrays import strided_layout
from ...plan.schedule import Layout, row_places, row_stride

Tensors: TypeAlias = Sequence[Any]

_DTYPES = {name: getattr(torch, name) for name in dtypes.ITEMSIZE}  # of what plans store
_NAMES = {_DTYPES[name]: name for name in dtypes.NAMES}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in plans; None for one that cupyfuse does not compute with."""
    return _NAMES.get(dtype)


def concrete_sizes(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Convert sizes to numbers, symbolic ones to what they stand for at the moment."""
    return tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else int(n) for n in sizes)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the memory layout of a tensor of at most two dimensions, as far as plans depend on it."""
    return strided_layout(tensor.shape, tensor.stride(), tensor.is_contiguous())


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Fold the leading dimensions of a tensor of more than two into rows."""
    return tensor if tensor.dim() <= 2 else tensor.detach().reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Fold as `as_matrix` does, but leave rows of two or three strides where they are: as many dimensions more."""
    if tensor.dim() <= 2 or tensor.is_contiguous() or row_places(*_sizes_and_strides(tensor)) is None:
        return as_matrix(tensor)
    return tensor.detach()


def lies_in_rows(tensor: torch.Tensor) -> bool:
    """Whether row programs can read a tensor's rows where they are, as `as_rows` leaves them."""
    return folds(tensor) or row_places(*_sizes_and_strides(tensor)) is not None


def folds(tensor: torch.Tensor) -> bool:
    """Whether `as_matrix` takes a tensor's memory as it is; else, as for permuted dimensions, it copies."""
    return tensor.dim() <= 2 or row_stride(*_sizes_and_strides(tensor)) is not None


def _sizes_and_strides(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return concrete_sizes(tensor.shape), concrete_sizes(tensor.stride())


def without_memory(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return a contiguous tensor of the device "meta"."""
    return torch.empty(tuple(shape), dtype=_DTYPES[dtype], device="meta")


def layout_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device "meta" with a tensor's shape, dtype and strides, symbols as what they stand for."""
    return torch.empty_strided(*_sizes_and_strides(tensor), dtype=tensor.dtype, device="meta")


def as_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that is no view: views from custom operations cannot be changed in place."""
    return tensor.new_empty(0).set_(tensor) if tensor._is_view() else tensor


def bump_version(tensor: torch.Tensor) -> None:
    """Tell autograd, and others that compare versions, that the tensor's memory was written to."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class TensorMemory:
    """The array functions of a `cuda.runtime.Runtime`, for tensors; none is recorded for autograd."""

    address = staticmethod(torch.Tensor.data_ptr)
    strides = staticmethod(torch.Tensor.stride)
    is_contiguous = staticmethod(torch.Tensor.is_contiguous)
    bump_version = staticmethod(bump_version)
    hold: Callable[..., None] | None = None  # PyTorch's allocator has a pool for each graph

    def __init__(self, device: torch.device):
        self.place = device

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[name]

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
        size = dtype.itemsize
        # Bytes or integers, because interfaces between libraries have no names for all dtypes.
        described = _CudaMemory(address, shape, f"|i{size}" if size == 1 else f"<i{size}", size, strides)
        return torch.as_tensor(described, device=self.place).view(dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A detached tensor shares the version of the one that it was detached from: the change is seen there.
        target.detach().copy_(source.detach())


def _array_interface(address: int, shape: Any, typestr: str, itemsize: int, strides: Any) -> dict[str, Any]:
    """Describe memory by NumPy's (and CUDA's) array interface; strides count elements."""
    return {
        "version": 3,
        "data": (address, False),
        "shape": tuple(shape),
        "strides": tuple(s * itemsize for s in strides),
        "typestr": typestr,
    }


class _CudaMemory:
    """GPU memory with the CUDA array interface, from which PyTorch makes tensors."""

    def __init__(self, *memory: Any):
        self.__cuda_array_interface__ = _array_interface(*memory)


# On the CPU ---------------------------------------------------------------------------------------------------------


class _HostMemory:
    """A CPU tensor with NumPy's array interface; arrays made from it keep it alive."""

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]):
        self.tensor = tensor.detach()
        memory = tensor.data_ptr(), tensor.shape, dtype.str, dtype.itemsize, tensor.stride()
        self.__array_interface__ = _array_interface(*memory)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a CPU tensor as a NumPy array.

    `Tensor.numpy` would forbid ever resizing the tensor's storage, which is how sharded parameters free their memory.

    Raises
    ------
    TypeError
        It holds bfloat16, for which NumPy needs the package ml_dtypes.
    """
    name = _NAMES[tensor.dtype]
    dtype = dtypes.to_numpy(name)
    if not tensor.numel():
        return np.empty(tensor.shape, dtype)
    return np.asarray(_HostMemory(tensor, np.dtype(np.int16) if name == "bfloat16" else dtype)).view(dtype)


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with the memory of a NumPy array."""
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.new_empty(array.shape)  # NumPy's strides without elements are 0
