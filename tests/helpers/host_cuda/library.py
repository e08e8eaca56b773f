"""Emitted kernels compiled by g++ against the shim: many in one translation unit, several units at once."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupyfuse.cuda.kernel import Kernel

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels_cu"
TEMPLATES = ("row_lanes", "row_block", "row_shared", "row_shares", "row_stream", "row_columns")
TEMPLATES += ("elementwise", "column_stats", "scan", "gemm", "fingerprint")
TEMPLATES += ("split_rows", "split_columns", "split_gemm", "split_repair")
HEADERS = ("launch_order.cuh",)  # of entries, which no template includes
COMPILER = os.environ.get("CXX", "g++")
OPTIONS = ["-std=c++17", "-fPIC", "-w"]
# Of kernels. No optimisation: compiling takes most of the time. Variables that nobody has set hold a large number.
OF_KERNELS = ["-O0", "-ftrivial-auto-var-init=pattern", "-fno-exceptions", "-fno-asynchronous-unwind-tables"]
CHECKS = "alignment,null,bounds,shift,signed-integer-overflow,integer-divide-by-zero,bool,return"
_IN_ONE_UNIT = 24
_ALIGNMENT = 128  # of what a kernel takes
COMMON = "common.h"  # the shim and the templates
# Compiling the common part beforehand takes as long as it saves in two units.
_UNITS_READ_PLAIN = 2
# Libraries that the shim has loaded for all.
_SHARED = ["-shared", "-nostdlib"]
SHARED_BUILD = "CUPYFUSE_HOST_BUILD"  # the environment variable: a folder in which processes share what they compile


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
        Compile with AddressSanitizer, instead of the checks of undefined behaviour. The process then has to be started
        with it (see `sanitizer_environment`).
    """

    def __init__(self, kernels: Path = KERNELS, address_sanitizer: bool = False):
        self.options = [*OPTIONS]
        self.options += ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1"] if address_sanitizer else []
        # By their texts: checkouts with other kernels share the shim alone.
        shim = [COMPILER, *self.options, *_texts(HERE)]
        # What AddressSanitizer runs, others run with checks.
        checks = [] if address_sanitizer else [f"-fsanitize={CHECKS}"]
        self.of_kernels = [*OF_KERNELS, *checks, "-I", str(kernels)]
        self._temporary = None if SHARED_BUILD in os.environ else tempfile.TemporaryDirectory(prefix="host_cuda_")
        folder = Path(self._temporary.name if self._temporary else os.environ[SHARED_BUILD])
        self._shim = folder / f"shim_{_digest(shim)}"
        self._optimisation = "-O1" if address_sanitizer else "-O2"  # with AddressSanitizer the second takes seconds
        self._directory = folder / _digest([*shim, *self.of_kernels, *_texts(kernels)])
        self._launches: dict[str, Launch] = {}
        self._pending: dict[str, Kernel] = {}
        self._ready = False

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
        if not self._ready:
            self._load_shim()
            self._ready = True
        size = max(1, min(_IN_ONE_UNIT, -(-len(wanted) // _processors())))
        units = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        self._prepare_common(len(units))
        with ThreadPoolExecutor(_processors()) as pool:
            for unit, path in zip(units, pool.map(self._unit, units), strict=True):
                library = ctypes.CDLL(str(path))
                for number, kernel in enumerate(unit):
                    self._launches[kernel.source] = _launcher(library, number, kernel.name)

    def _load_shim(self) -> None:
        self._shim.mkdir(parents=True, exist_ok=True)
        with locked(self._shim / "lock"):
            shim = self._built(self._shim / "shim.so", HERE / "shim.cpp", [self._optimisation, "-shared"])
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)

    def _prepare_common(self, units: int) -> None:
        """Write what all units have in common; compile it beforehand once that pays."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with locked(self._directory / "lock"):
            header = self._directory / COMMON
            if not header.exists():
                _write(
                    header,
                    "".join(f'#include "{name}"\n' for name in ("shim.h", *HEADERS, *(f"{t}.cu" for t in TEMPLATES))),
                )
            compiled = self._directory / f"{COMMON}.gch"
            if not compiled.exists() and units + len(list(self._directory.glob("*.so"))) > _UNITS_READ_PLAIN:
                self._built(compiled, header, [*self.of_kernels, "-x", "c++-header"])

    def _unit(self, kernels: Sequence[Kernel]) -> Path:
        text = translation_unit(kernels)
        name = _digest([text])
        source = self._directory / f"{name}.cpp"
        _write(source, text)
        return self._built(self._directory / f"{name}.so", source, [*self.of_kernels, *_SHARED])

    def _built(self, target: Path, source: Path, more: list[str]) -> Path:
        if target.exists():  # another process has compiled it
            return target
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        command = [COMPILER, *self.options, *more, "-I", str(HERE), "-o", str(part), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{' '.join(command)}\n{done.stderr[:4000]}")
        part.replace(target)
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
            f'extern "C" const char* launch{number}(const char* name, const void* program, size_t bytes, '
            "host_cuda::Index grid, host_cuda::Index block, size_t shared, host_cuda::Word64 seed) {",
            f'    if (bytes != sizeof(unit{number}::Program)) return "{kernel.name}: a struct of another size";',
            f"    return host_cuda::launch(name, unit{number}::enter, program, grid, block, shared, {kernel.cluster}, "
            "seed);",
            "}",
        ]
    return "\n".join(lines) + "\n"


class Index(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def _launcher(library: ctypes.CDLL, number: int, name: str) -> Launch:
    function = getattr(library, f"launch{number}")
    function.restype = ctypes.c_char_p
    size = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, size, Index, Index, size, ctypes.c_uint64]

    def launch(program: bytes, grid: tuple[int, ...], block: tuple[int, ...], shared: int, seed: int) -> None:
        # A copy, aligned as the largest member may ask. Launches copy as many bytes as the kernel's struct has.
        memory = ctypes.create_string_buffer(len(program) + _ALIGNMENT)
        at = ctypes.c_char_p(-(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT)
        ctypes.memmove(at, program, len(program))
        report = function(name.encode(), at, len(program), Index(*grid), Index(*block), shared, seed)
        if report is not None:
            raise HostCudaError(report.decode())

    return launch


def _processors() -> int:
    """Processors that this process has, if others run tests beside it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.[ch]*"))]


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _write(path: Path, text: str) -> None:
    """Write a file that another process may write at the same time."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time through."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sanitizer_environment() -> dict[str, str]:
    """What a Python process needs in its environment to load libraries that were built with AddressSanitizer."""
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    options = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=99"
    return {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": options}
