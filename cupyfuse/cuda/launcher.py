"""The compiled launcher: a module in C, installed apart, that runs what `launch.py` otherwise generates as Python text.

It is the distribution `cupyfuse-launcher`, the folder `launcher/` of the repository. Without it, or with
`CUPYFUSE_LAUNCHER=python` in the environment, Python launches. `python -m cupyfuse info` says which of the two does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import EngineError
from . import driver, tensor_map
from .structs import KernelCall, Launch, StructLaunch

MODULE, VARIABLE = "cupyfuse_launcher", "CUPYFUSE_LAUNCHER"
_CHOICES = ("compiled", "python")
_INTERFACE = 3  # of the programs written here
_MOST_DEVICES = 64


class Found(NamedTuple):
    """What launches: the compiled module, or None for Python; and why."""

    module: Any
    reason: str


@functools.lru_cache(maxsize=1)
def find() -> Found:
    """Find what launches, once per process.

    Raises
    ------
    EngineError
        The environment asks for the compiled launcher, which cannot be used, or for what does not exist.

    Warns
    -----
    RuntimeWarning
        A compiled launcher is installed, but cannot be used.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", *_CHOICES):
        raise EngineError(f"{VARIABLE}: expected one of {', '.join(_CHOICES)} in the environment, got {choice!r}")
    if choice == "python":
        return Found(None, f"{VARIABLE} is set")
    try:
        module = importlib.import_module(MODULE)
        found = getattr(module, "INTERFACE", None)
        reason = "" if found == _INTERFACE else f"its interface is {found}, expected {_INTERFACE}; install it again"
    except ImportError as error:
        found, reason = None, "" if isinstance(error, ModuleNotFoundError) else f"it cannot be imported: {error}"
        module = None
        if not reason and choice != "compiled":
            return Found(None, "cupyfuse-launcher is not installed")
        reason = reason or "it is not installed"
    if not reason:
        return Found(module, f"{MODULE}, interface {found}")
    if choice == "compiled":
        raise EngineError(f"{VARIABLE} asks for the compiled launcher: {reason}")
    warnings.warn(f"the compiled launcher is not used: {reason}", RuntimeWarning, stacklevel=2)
    return Found(None, f"cupyfuse-launcher: {reason}")


def describe() -> str:
    """Say what launches, and why."""
    module, reason = find()
    return f"{'Python' if module is None else 'compiled'} ({reason})"


def compile(launches: Sequence[StructLaunch | Launch], in_python: Launch) -> Launch:
    """Return the compiled function of launches whose kernels have handles; `in_python` itself where Python launches.

    The kernels' device has to be current. Launches on anything but a stream of the GPU, and the first of a thread on a
    device, remain Python's.
    """
    module = find().module
    device = driver.current_device() if module is not None else 0
    if module is None or device >= _MOST_DEVICES:
        return in_python
    program = _Program(in_python, device)
    for launch in launches:
        if isinstance(launch, StructLaunch):
            program.add_kernels(launch)
        else:
            program.add("CALL", program.object(launch))
    compiled: Launch = module.compile(program.steps(), bytes(program.data), tuple(program.objects))
    return compiled


# The steps, in the order of `enum Op` in launches.c, which says what they do.
_OPS = ("HEADER", "CALL", "STRUCT", "POINTER", "CHECK", "ALIGNED", "NUMBER", "MAP", "LAUNCH")


class _Program:
    """A program as launches.c reads it.

    Attributes
    ----------
    data : bytearray
        The structs as packed beforehand, and constants.
    objects : list
        What is called.
    """

    def __init__(self, in_python: Launch, device: int):
        self.data = bytearray()
        self.objects: list[Callable[..., Any]] = [in_python, EngineError]
        self._steps: list[tuple[str, tuple[int, ...]]] = []
        library = driver.driver()
        functions = library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled
        addresses = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        self.add("HEADER", *addresses, device, int(driver.takes_early_launches()))

    def add(self, op: str, *operands: int) -> None:
        """Append a step."""
        self._steps.append((op, operands))

    def object(self, value: Callable[..., Any]) -> int:
        """Return the number of an object that steps call."""
        self.objects.append(value)
        return len(self.objects) - 1

    def _constant(self, packed: bytes) -> int:
        """Append bytes to the data, and return where they are."""
        start = len(self.data)
        self.data += packed
        return start

    def add_kernels(self, launch: StructLaunch) -> None:
        """Append the steps of kernels that are launched with one struct."""
        layout = launch.struct
        self.add("STRUCT", self._constant(struct.pack("=" + layout.form, *layout.members)), len(layout.members))
        for index, slot, start in layout.pointers:
            self.add("POINTER", index, slot, start)
        if launch.alignment > 1 and launch.aligned:
            members = {(slot, start): index for index, slot, start in layout.pointers}
            for index in dict.fromkeys(members[each] for each in launch.aligned):
                self.add("CHECK", index)
            assert launch.otherwise is not None
            behind = len(self._steps) + 1 + len(layout.maps) + len(layout.numbers) + len(launch.kernels)
            self.add("ALIGNED", launch.alignment - 1, self.object(launch.otherwise), behind)
        for index, source in layout.maps:
            matrix = -1 if source.matrix is None else self._constant(tensor_map.pack(source.matrix))
            self.add("MAP", index, max(source.slot, 0), source.start, matrix, self.object(source.encode))
        for index, slot, number in layout.numbers:
            self.add("NUMBER", index, slot, self.object(number.evaluate))
        for k, call in enumerate(launch.kernels):
            self.add("LAUNCH", self._constant(_pack_kernel(call)), k == len(launch.kernels) - 1)

    def steps(self) -> bytes:
        """Return the steps as packed integers: the operation and five operands each."""
        padded = ((_OPS.index(op), *operands, *[0] * (5 - len(operands))) for op, operands in self._steps)
        return b"".join(struct.pack("=6q", *step) for step in padded)


def _pack_kernel(call: KernelCall) -> bytes:
    """Return a kernel and its launch configuration as `Kernel` of launches.c."""
    return struct.pack("=Q8I", call.function.ptr, *call.grid, *call.block, call.shared, 0)
