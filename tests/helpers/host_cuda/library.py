"""Emitted kernels compiled by g++ against the shim: many in one translation unit, several units at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupyfuse.cuda.kernel import Kernel

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels_cu"
TEMPLATES = ("row_lanes", "row_block", "row_persistent", "row_stream", "elementwise", "column_stats")
TEMPLATES += ("split_rows", "split_columns", "split_gemm", "split_repair", "fingerprint")
COMPILER = os.environ.get("CXX", "g++")
# No optimisation: compiling takes most of the time. Variables that nobody has set hold a large number.
OPTIONS = ["-std=c++17", "-O0", "-fPIC", "-w", "-ftrivial-auto-var-init=pattern"]
CHECKS = "alignment,null,bounds,shift,signed-integer-overflow,integer-divide-by-zero,bool,return"
_IN_ONE_UNIT = 24
COMMON = "common.h"  # the shim and the templates, compiled beforehand


class HostCudaError(AssertionError):
    """A kernel did on the CPU what it must not do on a GPU; the message names the kernel, the file and the line."""


class CompileError(AssertionError):
    """g++ refuses a source."""


Launch = Callable[[bytes, tuple[int, ...], tuple[int, ...], int, int], None]


class Library:
    """Compiled kernels by their source.

    Parameters
    ----------
    kernels : path
        The directory of the templates and headers.
    address_sanitizer : bool
        Compile with AddressSanitizer. The process then has to be started with it (see `sanitizer_environment`).
    """

    def __init__(self, kernels: Path = KERNELS, address_sanitizer: bool = False):
        self.kernels = kernels
        self.options = [*OPTIONS, f"-fsanitize={CHECKS}", "-I", str(kernels)]
        self.options += ["-fsanitize=address", "-fno-omit-frame-pointer", "-g"] if address_sanitizer else []
        self._directory = tempfile.TemporaryDirectory(prefix="host_cuda_")
        self._launches: dict[str, Launch] = {}
        self._pending: dict[str, Kernel] = {}
        self._units = 0
        self._shim: Path | None = None

    def __len__(self) -> int:
        """How many kernels have been compiled."""
        return len(self._launches)

    def want(self, kernel: Kernel) -> None:
        """Compile this kernel along with the others, once one of them is needed."""
        if kernel.source not in self._launches:
            self._pending[kernel.source] = kernel

    def launch(self, kernel: Kernel) -> Launch:
        if kernel.source not in self._launches:
            self.want(kernel)
            self.compile()
        return self._launches[kernel.source]

    def compile(self) -> None:
        """Compile everything that is wanted."""
        wanted = list(self._pending.values())
        self._pending.clear()
        if self._shim is None:
            self._shim = self._built("shim.so", HERE / "shim.cpp", ["-O1", "-shared"])
            ctypes.CDLL(str(self._shim), mode=ctypes.RTLD_GLOBAL)
            header = Path(self._directory.name) / COMMON
            header.write_text("\n".join(['#include "shim.h"', *(f'#include "{name}.cu"' for name in TEMPLATES)]) + "\n")
            self._built(f"{COMMON}.gch", header, ["-x", "c++-header"])
        size = max(1, min(_IN_ONE_UNIT, -(-len(wanted) // _processors())))
        units = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        with ThreadPoolExecutor(_processors()) as pool:
            for unit, path in zip(units, pool.map(self._unit, units), strict=True):
                library = ctypes.CDLL(str(path))
                for number, kernel in enumerate(unit):
                    self._launches[kernel.source] = _launcher(library, number, kernel.name)

    def _unit(self, kernels: Sequence[Kernel]) -> Path:
        self._units += 1
        name = f"unit{self._units}"
        source = Path(self._directory.name) / f"{name}.cpp"
        source.write_text(translation_unit(kernels))
        return self._built(f"{name}.so", source, ["-shared"])

    def _built(self, name: str, source: Path, more: list[str]) -> Path:
        target = Path(self._directory.name) / name
        command = [COMPILER, *self.options, *more, "-I", str(HERE), "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{' '.join(command)}\n{done.stderr[:4000]}")
        return target


def translation_unit(kernels: Iterable[Kernel]) -> str:
    """One C++ source: what all have in common, each emitted text in a namespace of its own, and how to launch it."""
    lines = [f'#include "{COMMON}"']
    for number, kernel in enumerate(kernels):
        entry = f"{kernel.name}_{number}"
        lines += [
            f"#define {kernel.name} {entry}",
            f"namespace unit{number} {{",
            f'#line 1 "emitted {kernel.name}"',
            kernel.source,
            f"void enter(const void* program) {{ {entry}(*static_cast<const Program*>(program)); }}",
            "}",
            f"#undef {kernel.name}",
            f'extern "C" const char* launch{number}(const char* name, const void* program, host_cuda::Index grid, '
            "host_cuda::Index block, size_t shared, host_cuda::Word64 seed) {",
            f"    return host_cuda::launch(name, unit{number}::enter, program, grid, block, shared, seed);",
            "}",
        ]
    return "\n".join(lines) + "\n"


class Index(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def _launcher(library: ctypes.CDLL, number: int, name: str) -> Launch:
    function = getattr(library, f"launch{number}")
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, Index, Index, ctypes.c_size_t, ctypes.c_uint64]

    def launch(program: bytes, grid: tuple[int, ...], block: tuple[int, ...], shared: int, seed: int) -> None:
        # The struct has eight-byte members: an aligned copy.
        words = (ctypes.c_uint64 * (len(program) // 8)).from_buffer_copy(program)
        at = ctypes.cast(words, ctypes.c_char_p)
        report = function(name.encode(), at, Index(*grid), Index(*block), shared, seed)
        if report is not None:
            raise HostCudaError(report.decode())

    return launch


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def sanitizer_environment() -> dict[str, str]:
    """What a Python process needs in its environment to load libraries that were built with AddressSanitizer."""
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    options = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=99"
    return {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": options}
