"""Tensor maps: descriptors by which Hopper's tensor memory accelerator (TMA) copies matrices, encoded by the driver."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from ..errors import EngineError
from .driver import driver

WORDS = 16  # of eight bytes, in a tensor map
BOX = 64  # elements of a line of a box: 128 bytes, the width of the swizzle
ALIGNMENT = 16  # bytes, of addresses and lines
# CUtensorMapDataType by the bytes of an element, of unsigned integers: copies do not look at what elements are.
_TYPES = {2: 1, 4: 2}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by the bytes of a box's lines
# CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
_NO_INTERLEAVE, _PROMOTE_256B, _ZEROS = 0, 3, 0
_MAP_ALIGNMENT = 128  # bytes


@dataclass(frozen=True)
class MatrixBoxes:
    """A matrix, and the boxes in which it is copied, swizzled by the bytes of their lines: 32, 64 or 128.

    Attributes
    ----------
    lines, length : int
        The rows of the matrix as stored, and the elements of each.
    stride : int
        Bytes from one line to the next, a multiple of 16.
    box : tuple of int
        Lines of a box, and elements of each.
    itemsize : int
        Bytes of an element, 2 or 4.
    """

    lines: int
    length: int
    stride: int
    box: tuple[int, int]
    itemsize: int = 2

    @property
    def swizzle(self) -> int:
        """The driver's number of the swizzle."""
        return _SWIZZLES[self.box[1] * self.itemsize]


def pack(matrix: MatrixBoxes) -> bytes:
    """Return what `encode` asks the driver for as `Matrix` of launches.c."""
    sizes, box, steps = (matrix.length, matrix.lines), (matrix.box[1], matrix.box[0]), (1, 1)
    modes = _NO_INTERLEAVE, matrix.swizzle, _PROMOTE_256B, _ZEROS
    kind = _TYPES[matrix.itemsize]
    return struct.pack("=4Q4I6i", *sizes, matrix.stride, ALIGNMENT, *box, *steps, kind, len(sizes), *modes)


def encode(matrix: MatrixBoxes, address: int) -> tuple[int, ...]:
    """Encode the tensor map of a matrix at an address, as 64-bit words.

    Raises
    ------
    EngineError
        The driver refuses: it is too old, or an address or a stride is not aligned.
    """
    memory = ctypes.create_string_buffer(8 * WORDS + _MAP_ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(matrix.length, matrix.lines)
    strides = (ctypes.c_uint64 * 1)(matrix.stride)
    box = (ctypes.c_uint32 * 2)(matrix.box[1], matrix.box[0])
    steps = (ctypes.c_uint32 * 2)(1, 1)
    status = driver().cuTensorMapEncodeTiled(
        *(place, _TYPES[matrix.itemsize], 2, address, sizes, strides, box, steps),
        *(_NO_INTERLEAVE, matrix.swizzle, _PROMOTE_256B, _ZEROS),
    )
    if status:
        raise EngineError(
            f"cuTensorMapEncodeTiled failed with status {status} for {matrix} at address {address:#x}: the address and "
            "the stride have to be multiples of 16 bytes"
        )
    return tuple((ctypes.c_uint64 * WORDS).from_address(place))
