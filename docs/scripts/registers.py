"""Write docs/registers.md: what the kernels of common row programs take of a multiprocessor. Needs NVRTC, no GPU.

python -m docs.scripts.registers
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cupyfuse as cf
from benchmarks import row_programs
from cupyfuse.cuda.compile import cubin
from cupyfuse.cuda.kernel import Kernel
from cupyfuse.cuda.sources import kernels_of

PAGE = Path(__file__).resolve().parent.parent / "registers.md"
ARCHITECTURE = "sm_90"
ELEMENTS = 1 << 28
LENGTHS = (17, 100, 256, 1000, 1024, 4096, 8191, 16384, 32768, 50257, 65536, 128256, 262144, 1 << 20)
DTYPES = ("float32", "bfloat16", "float64")


def head_tail(x: Any) -> Any:
    return cf.gelu(cf.gelu(cf.leaky_relu(cf.leaky_relu(cf.logsumexp(x, axis=1)))))


def softmax_backward(x: Any, dy: Any) -> Any:
    """The gradient of softmax from its operand, as chains of PyTorch's operations compute it."""
    y = cf.softmax(x, axis=1)
    return y * (dy - (y * dy).sum(axis=1, keepdims=True))


def layer_norm_backward(x: Any, dy: Any, gamma: Any) -> tuple[Any, Any, Any]:
    """The gradients of a layer norm by its operand, its scale and its bias."""
    centred = x - x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    normal, g = centred * scale, dy * gamma
    along_rows = scale * (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True))
    return along_rows, (dy * normal).sum(axis=0), dy.sum(axis=0)


def standardised(y: Any, mean: Any, rate: Any, gamma: Any, beta: Any) -> Any:
    """Columns as BatchNorm leaves them."""
    return (y - mean) * rate * gamma + beta


def batch_norm_softmax_backward(y: Any, dy: Any, mean: Any, rate: Any, gamma: Any, beta: Any) -> Any:
    """The gradient of what is standardised before a softmax."""
    p = cf.softmax(standardised(y, mean, rate, gamma, beta), axis=1)
    return p * (dy - (p * dy).sum(axis=1, keepdims=True))


# Functions of matrices and of vectors as long as a row: those of `python -m benchmarks rows`, and others.
PROGRAMS: dict[str, tuple[cf.Fused, int, int]] = {
    title: (
        row_programs.PROGRAMS[name].fused,
        row_programs.PROGRAMS[name].matrices,
        row_programs.PROGRAMS[name].vectors,
    )
    for title, name in (
        ("softmax", "softmax"),
        ("log_softmax", "log_softmax"),
        ("softmax, backward", "softmax_backward"),
        ("affine and softmax", "affine_softmax"),
        ("layer norm", "layer_norm"),
        ("RMS norm", "rms_norm"),
    )
} | {
    "softmax, backward from its operand": (cf.fuse(softmax_backward), 2, 0),
    "layer norm, backward": (cf.fuse(layer_norm_backward), 2, 1),
    "BatchNorm and softmax": (cf.fuse(lambda y, *vectors: cf.softmax(standardised(y, *vectors), axis=1)), 1, 4),
    "bias, BatchNorm and softmax": (
        cf.fuse(lambda y, bias, *vectors: cf.softmax(standardised(y + bias, *vectors), axis=1)),
        1,
        5,
    ),
    "BatchNorm and softmax, backward": (cf.fuse(batch_norm_softmax_backward), 2, 4),
    "logsumexp and four activations": (cf.fuse(head_tail), 1, 0),
    "sum": (row_programs.PROGRAMS["sum"].fused, 1, 0),
    "GELU": (cf.fuse(lambda x: cf.gelu(x)), 1, 0),
    "column sums": (cf.fuse(lambda x: x.sum(axis=0)), 1, 0),
}


class Entry(NamedTuple):
    """A kernel of a program, for rows of some length."""

    program: str
    dtype: str
    length: int
    kernel: Kernel


def entries() -> Iterator[Entry]:
    """Yield the kernels of every program, length and dtype."""
    for name, (function, matrices, vectors) in PROGRAMS.items():
        for length in LENGTHS:
            for dtype in DTYPES:
                shape = max(1, ELEMENTS // length), length
                given = [cf.spec(shape, dtype)] * matrices + [cf.spec(length, dtype)] * vectors
                plan = function.plan(*given)
                for part in plan.parts:
                    for step in part.steps:
                        for kernel in kernels_of(step, part.scheduled.storage, clusters=True):
                            yield Entry(name, dtype, length, kernel)


class Resources(NamedTuple):
    """What a kernel takes of a multiprocessor.

    Attributes
    ----------
    registers : int
        Of a thread.
    stack : int
        Bytes of a thread's local memory: registers that are spilled or saved around calls, arrays that variables index.
    shared : int
        Bytes of a block's static shared memory; if there is any, from sm_90 on with the 1024 that the system takes.
    """

    registers: int
    stack: int
    shared: int


def resources_of(binary: bytes) -> Resources:
    """Read what the kernel of an ELF binary takes; of it and of functions that it calls, the most."""
    sections = dict(_sections(binary))
    offset, size = sections[".nv.info"]
    notes = list(_notes(binary[offset : offset + size]))
    shared = [size for name, (_, size) in sections.items() if re.match(r"\.nv\.shared\.(?!reserved)", name)]
    registers, stacks = ([value for kind, value in notes if kind == wanted] for wanted in (_REGISTERS, _FRAME_SIZE))
    return Resources(max(registers), max(stacks), max(shared, default=0))


_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of functions
_SIZED = 4  # the form of notes that are followed by a size and so many bytes


def _sections(binary: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name, offset and size of each section of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + k * entry) for k in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        yield binary[start : binary.index(0, start)].decode(), (offset, size)


def _notes(section: bytes) -> Iterator[tuple[int, int]]:
    """Yield the attribute and the number of each note about a function."""
    at = 0
    while at < len(section):
        form, kind, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _SIZED:
            if size == 8:  # the function's symbol and a number
                yield kind, struct.unpack_from("<I", section, at + 4)[0]
            at += size


def measure(entry: Entry) -> Resources:
    arch = f"sm_{entry.kernel.arch}" if entry.kernel.arch else ARCHITECTURE
    return resources_of(cubin(entry.kernel.source, arch))


def threads_of(kernel: Kernel) -> int:
    """Return the threads of a kernel's blocks."""
    return kernel.config.merge_threads if "merge" in kernel.name else kernel.config.threads


def blocks_of(entry: Entry, taken: Resources) -> int:
    """Return how many blocks of a kernel fit into a multiprocessor of ARCHITECTURE (CUDA C++ Programming Guide)."""
    warps = -(-threads_of(entry.kernel) // 32)
    registers = -(-taken.registers // 8) * 8 * 32 * warps
    shared = max(taken.shared, 1024) + entry.kernel.shared
    return min(65536 // registers, 233472 // shared, 2048 // (32 * warps), 32)


def head_of(kernel: Kernel) -> str:
    """Return the beginning of a kernel's cell: its template and threads."""
    return f"`{kernel.name.removesuffix('_kernel')}` {threads_of(kernel)}"


def describe(entry: Entry, taken: Resources) -> str:
    """Return what a kernel takes, as a cell of a table shows it."""
    shared = (taken.shared + entry.kernel.shared) / 1024
    parts = [f"{head_of(entry.kernel)} × {blocks_of(entry, taken)}", f"{taken.registers} registers"]
    parts += [f"{shared:.0f} KiB"] if shared >= 4 else []
    parts += [f"**{taken.stack} B of stack**"] if taken.stack else []
    return ", ".join(parts)


def page() -> str:
    """Compile each distinct kernel, and return the tables."""
    listed = list(entries())
    distinct = {(e.kernel.source, e.kernel.arch): e for e in listed}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        taken = dict(zip(distinct, pool.map(measure, distinct.values()), strict=True))
    lines = [_INTRODUCTION]
    for name in PROGRAMS:
        lines += [f"## {name}", "", f"| columns | {' | '.join(DTYPES)} |", "|---:|---|---|---|"]
        for length in LENGTHS:
            cells: dict[str, list[str]] = {dtype: [] for dtype in DTYPES}
            for e in listed:
                if e.program == name and e.length == length:
                    cells[e.dtype].append(describe(e, taken[e.kernel.source, e.kernel.arch]))
            lines.append(f"| {length} | {' | '.join('; '.join(cell) for cell in cells.values())} |")
        lines.append("")
    return "\n".join(lines)


_INTRODUCTION = f"""\
# Registers and shared memory of kernels

What the kernels of common row programs take on {ARCHITECTURE}, in their default configurations for contiguous arrays of
2²⁸ elements; by `python -m docs.scripts.registers`, which needs NVRTC and no GPU. A cell has the template, the
threads of a block × the blocks that fit into a multiprocessor, the registers of a thread, the shared memory of a block
from 4 KiB on, and the stack of a thread: registers that are spilled or saved around calls.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
