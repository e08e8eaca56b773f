"""PyTorch's tensors as the engines see them: dtypes, layouts, memory, and tensors of the CPU as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import dtypes
from ...api.arrays import strided_layout
from ...plan.schedule import Layout

_DTYPES = {name: getattr(torch, name) for name in dtypes.NAMES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of a dtype in plans; None for one that cupyfuse does not compute with."""
    return _NAMES.get(dtype)


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a tensor of at most two dimensions lies in memory, as far as plans depend on it."""
    return strided_layout(tensor.shape, tensor.stride(), tensor.is_contiguous())


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of at most two dimensions: leading ones of more are folded into rows."""
    return tensor if tensor.dim() <= 2 else tensor.detach().reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def as_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that is no view: views that custom operations return cannot be changed in place."""
    return tensor.new_empty(0).set_(tensor) if tensor._is_view() else tensor


def changed(tensor: torch.Tensor) -> None:
    """Let autograd, and whoever else compares versions, see that the tensor's memory was written to."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class Tensors:
    """The part of a `cuda.runtime.Runtime` that is about arrays, for tensors of one device.

    Tensors may require gradients: nothing here is differentiated.
    """

    address = staticmethod(torch.Tensor.data_ptr)
    strides = staticmethod(torch.Tensor.stride)
    contiguous = staticmethod(torch.Tensor.is_contiguous)
    changed = staticmethod(changed)

    def __init__(self, device: torch.device):
        self.place = device

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[name]

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
        return torch.as_tensor(_Described(address, shape, dtype, strides), device=self.place).view(dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A detached tensor shares the version of the one that it was detached from: the change is seen there.
        target.detach().copy_(source.detach())


class Workspace:
    """Memory of PyTorch's allocator, for as long as the object lives.

    Whoever allocates next on the same stream may get it, and is ordered behind the launches that use it; while a CUDA
    graph is captured it comes from the graph's own pool.
    """

    __slots__ = ("ptr", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.ptr = tensor.data_ptr()


class _Described:
    """Memory as PyTorch takes it over from other libraries, without types of its own."""

    def __init__(self, address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]):
        itemsize = dtype.itemsize
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(s * itemsize for s in strides),
            "typestr": f"|i{itemsize}" if itemsize == 1 else f"<i{itemsize}",
        }


# On the CPU ---------------------------------------------------------------------------------------------------------


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor on the CPU as a NumPy array.

    Unlike `Tensor.numpy`, which forbids the tensor's storage to be resized ever after: sharded parameters give their
    memory back that way.

    Raises
    ------
    TypeError
        It holds bfloat16, which NumPy knows from the package ml_dtypes only.
    """
    name = _NAMES[tensor.dtype]
    dtype = dtypes.to_numpy(name)
    if not tensor.numel():
        return np.empty(tensor.shape, dtype)
    return np.asarray(_Memory(tensor, np.dtype(np.int16) if name == "bfloat16" else dtype)).view(dtype)


class _Memory:
    """The memory of a tensor as NumPy takes it over; alive for as long as an array is a view of it."""

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]):
        self.tensor = tensor.detach()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(s * dtype.itemsize for s in tensor.stride()),
            "typestr": dtype.str,
        }


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor with the memory of a NumPy array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.new_empty(array.shape)  # NumPy's strides without elements are 0
