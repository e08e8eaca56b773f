"""CUDA's driver without a GPU (driver_stand_in.c), and the compiled launcher, both compiled for the tests.

Python calls the stand-in by ctypes, as it calls the driver; the launcher calls it by its addresses.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from host_cuda.library import SHARED_BUILD, locked

HELPERS = Path(__file__).resolve().parent
LAUNCHER = HELPERS.parents[1] / "launcher"
COMPILER = os.environ.get("CC", "gcc")
OPTIONS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1")
MOST_BYTES = 2048


@functools.cache
def built(sources: Sequence[Path], more: Sequence[str] = ()) -> Path:
    """Compile a shared library; once for all processes of a test run."""
    if shutil.which(COMPILER) is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip(f"the launcher needs the C compiler {COMPILER!r} and Python's headers")
    command = [COMPILER, *OPTIONS, *more, "-I", sysconfig.get_path("include")]
    texts = [path.read_text() for path in sorted(sources[0].parent.glob("*.[ch]"))]
    digest = hashlib.sha256("\0".join([*command, *texts]).encode()).hexdigest()[:32]
    folder = Path(os.environ.get(SHARED_BUILD) or tempfile.mkdtemp(prefix="launcher_"))
    target = folder / f"{sources[0].stem}_{digest}.so"
    with locked(folder / f"{sources[0].stem}.lock"):
        if not target.exists():
            done = subprocess.run([*command, "-o", target, *sources], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    return target


_copies = itertools.count()


def load_launcher(folder: Path) -> Any:
    """Load the compiled launcher anew, by a copy in a folder: no thread has launched yet."""
    copy = folder / f"launcher_{next(_copies)}.so"
    shutil.copy(
        built(tuple(sorted(LAUNCHER.glob("*.c"))), SANITIZE if "libasan" in os.environ.get("LD_PRELOAD", "") else ()),
        copy,
    )
    loader = importlib.machinery.ExtensionFileLoader("cupyfuse_launcher", str(copy))
    spec = importlib.util.spec_from_loader("cupyfuse_launcher", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Record(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("function", "stream")),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block")),
        *((name, ctypes.c_uint) for name in ("shared", "attribute_count")),
        *((name, ctypes.c_int) for name in ("attribute", "value")),
        ("nbytes", ctypes.c_uint64),
        ("bytes", ctypes.c_ubyte * MOST_BYTES),
    )


class Launched(NamedTuple):
    """A launch as the driver was told of it; `attributes` are those of the launch, by their numbers."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: dict[int, int]
    packed: bytes


class DriverStandIn:
    """The driver's functions that launch and encode tensor maps.

    Parameters
    ----------
    struct_bytes : int
        How many bytes of each struct are noted.
    sized : bool
        A kernel's handle is the address of this number instead.

    Attributes
    ----------
    during : callable or None
        Called while the next launch is under way; returns the driver's status, None for success.
    """

    def __init__(self, struct_bytes: int = 0, sized: bool = False):
        self.library = library = ctypes.CDLL(str(built((HELPERS / "driver_stand_in.c",))))
        self.cuLaunchKernelEx, self.cuTensorMapEncodeTiled = library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled
        self.cuLaunchKernelEx.restype = ctypes.c_int
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
        self.during: Callable[[], int | None] | None = None
        self._hook = ctypes.CFUNCTYPE(ctypes.c_int)(self._call_during)
        ctypes.c_void_p.in_dll(library, "during_launch").value = ctypes.cast(self._hook, ctypes.c_void_p).value
        self.set("record_count", 0)
        self.set("map_count", 0)
        self.set("encode_status", 0)
        self.set("struct_bytes", struct_bytes)
        self.set("sized", int(sized))

    def set(self, name: str, value: int) -> None:
        """Set a variable of the stand-in."""
        ctypes.c_uint.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        """Return a variable of the stand-in."""
        return ctypes.c_uint.in_dll(self.library, name).value

    def block(self) -> None:
        """Have launches wait until the variable `released` is set; `waiting` is once one does."""
        waits = ctypes.cast(self.library.wait_for_release, ctypes.c_void_p).value
        self.set("waiting", 0)
        self.set("released", 0)
        ctypes.c_void_p.in_dll(self.library, "during_launch").value = waits

    def call_directly(self) -> None:
        """Have launches call nothing of Python's, for many of them."""
        ctypes.c_void_p.in_dll(self.library, "during_launch").value = None

    def _call_during(self) -> int:
        during, self.during = self.during, None
        return (during() if during else None) or 0

    @property
    def launched(self) -> list[Launched]:
        """All launches so far."""
        count = self.get("record_count")
        records = (_Record * count).in_dll(self.library, "records")
        return [
            Launched(
                r.function, tuple(r.grid), tuple(r.block), r.shared, r.stream,
                {r.attribute: r.value} if r.attribute_count else {}, bytes(r.bytes[: r.nbytes]),
            )
            for r in records
        ]  # fmt: skip
