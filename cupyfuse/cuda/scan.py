"""Running totals along rows: `scan.cu`."""

from __future__ import annotations

from functools import lru_cache

from ..ir.graph import Node, Shape
from .config import Config
from .kernel import Kernel, translation_unit
from .runtime import Runtime
from .structs import KernelCall, StructLaunch, integers, pointer

_THREADS = 256
_WARP_COLUMNS = 128  # of rows up to which a warp has a row
_TYPES = {"float32": "float", "float64": "double"}
_OPERATIONS = {"cumsum": "Plus", "cumprod": "Times"}


class Scan:
    """The launch that writes running totals of the rows of a matrix.

    Parameters
    ----------
    op : str
        "cumsum" or "cumprod".
    shape : tuple of int
    strides : tuple of int
        Of the matrix in elements, from row to row and from column to column.
    dtype : str
    """

    def __init__(self, op: str, shape: Shape, strides: tuple[int, int], dtype: str):
        self.kernel = scan_kernel(op, dtype, _takes_warps(shape))
        self._shape, self._strides = shape, strides

    def launch(self, runtime: Runtime, matrix: int, start: int, totals: int) -> StructLaunch:
        """Load the kernel.

        The matrix begins `start` bytes behind the address in slot `matrix`; `totals` is the slot of the result's.
        """
        rows, cols = self._shape
        blocks = -(-rows // (_THREADS // 32)) if _takes_warps(self._shape) else rows
        call = KernelCall(runtime.function(self.kernel), (blocks, 1, 1), (_THREADS, 1, 1))
        struct = pointer(matrix, start) + integers(*self._strides) + pointer(totals) + integers(rows, cols)
        return StructLaunch([call], struct)


def _takes_warps(shape: Shape) -> bool:
    return shape[1] <= _WARP_COLUMNS


def kernel_of(node: Node) -> Kernel:
    """Return the kernel of a node."""
    return scan_kernel(node.op, node.dtype, _takes_warps(node.shape))


@lru_cache
def scan_kernel(op: str, dtype: str, by_warps: bool) -> Kernel:
    """Return the kernel for rows of a dtype that a warp scans, or a block."""
    kind = _TYPES[dtype]
    struct = f"struct Program {{ const {kind}* x; i64 row_stride; i64 col_stride; {kind}* y; i64 rows; i64 cols; }};"
    function = f"scan_by_{'warps' if by_warps else 'blocks'}<{kind}, {_OPERATIONS[op]}, {_THREADS}>"
    call = f"{function}(p.x, p.row_stride, p.col_stride, p.y, p.rows, p.cols)"
    source = translation_unit("scan", struct, "scan_kernel", call, _THREADS)
    return Kernel("scan_kernel", source, (), Config("scan", _THREADS, 1, 1))
