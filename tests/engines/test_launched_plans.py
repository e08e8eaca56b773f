"""Whole plans through Python's launches and through the compiled launcher: the driver is told the same."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from driver_stand_in import DriverStandIn, Launched, load_launcher
from host_cuda.library import Library
from host_cuda.runtime import HostRuntime, installed

import cupyfuse as cf
from cupyfuse import devices, settings
from cupyfuse.cuda import driver, launch, launcher, tensor_map
from cupyfuse.cuda.kernel import Kernel
from cupyfuse.cuda.structs import StructLaunch
from cupyfuse.engines import cuda, kernel_launch
from cupyfuse.engines.cuda import load

STREAM = 1 << 44


class Function:
    """A loaded kernel, whose handle is the address of its struct's size: the stand-in reads it there."""

    def __init__(self, name: str):
        self.name, self.size = name, ctypes.c_uint64()
        self.ptr = ctypes.addressof(self.size)

    def __call__(self, *arguments: Any) -> None:
        """A thread's first launch."""


class Gpu(HostRuntime):
    """A GPU whose driver is the stand-in: memory is the host's, each call allocates the same, and nothing computes."""

    def __init__(self) -> None:
        super().__init__(Library())
        self.device, self.processors = devices.DEVICES["H200"], 132
        self.functions: dict[int, Function] = {}
        self._memory = np.zeros(1 << 22, np.uint8)
        self.used = -self._memory.ctypes.data % 256

    def workspace(self, nbytes: int, held: bool = True) -> Any:
        start = self.used
        self.used += -(-nbytes // 256) * 256
        found = self._memory[start : start + nbytes]
        assert found.nbytes == nbytes
        return SimpleNamespace(ptr=self._memory.ctypes.data + start, bytes=found)

    def stream(self) -> int:  # type: ignore[override]
        return STREAM

    def compile_ahead(self, kernels: Sequence[Kernel]) -> None: ...

    def function(self, kernel: Kernel) -> Any:
        found = Function(kernel.name)
        self.functions[found.ptr] = found
        return found

    tensor_map = staticmethod(tensor_map.encode)  # type: ignore[assignment]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gpu, DriverStandIn]]:
    """A GPU, current in CuPy, and its driver."""
    runtime, stand_in = Gpu(), DriverStandIn(sized=True)
    cuda_of = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0, driverGetVersion=lambda: 13000),
        Device=lambda _: SimpleNamespace(compute_capability="90"),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda_of))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda_of)
    for module in (driver, tensor_map):
        monkeypatch.setattr(module, "driver", lambda: stand_in)

    def sequence(launches: Sequence[Any]) -> Any:
        for each in launches:
            for call in each.kernels if isinstance(each, StructLaunch) else ():
                call.function.size.value = 8 * len(each.struct.members)
        return launch.sequence(launches)

    for engine in (cuda, kernel_launch):
        monkeypatch.setattr(engine, "sequence", sequence)
    driver._takes_early_launches.cache_clear()
    with installed(runtime):
        yield runtime, stand_in
    driver._takes_early_launches.cache_clear()
    stand_in.call_directly()


def softmax(x: Any, bias: Any) -> Any:
    return cf.softmax(x + bias, axis=1)


def scaled(x: Any, bias: Any, factor: float) -> Any:
    return np.tanh(x * factor) * (factor + 1.0) + bias, (x * bias).sum(axis=0)


def head(x: Any, bias: Any, weight: Any) -> Any:
    return cf.gelu(cf.logsumexp(x @ weight.T + bias, axis=1, keepdims=True))


# The function, the dtype, the shapes of its arrays behind the first, its numbers.
CASES: dict[str, tuple[Callable[..., Any], Any, list[tuple[int, ...]], list[float]]] = {
    "rows": (softmax, np.float32, [(64,)], []),
    "numbers": (scaled, np.float32, [(64,)], [0.5]),
    "product with an epilogue": (head, ml_dtypes.bfloat16, [(96,), (96, 64)], []),
}


@pytest.mark.parametrize("case", CASES)
def test_plans_launch_the_same(
    gpu: tuple[Gpu, DriverStandIn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    (runtime, stand_in), (function, dtype, shapes, numbers) = gpu, CASES[case]
    memory, others = runtime.empty((40 * 64 + 8,), dtype), [runtime.empty(shape, dtype) for shape in shapes]
    x, misaligned, shifted = (memory[k : k + 40 * 64].reshape(40, 64) for k in (0, 1, 8))
    with settings.epilogues("always"):
        plan = cf.fuse(function).plan(x, *others, *numbers)
    told: dict[str, list[Launched]] = {}
    begin = runtime.used
    for way, module in (("python", None), ("compiled", load_launcher(tmp_path))):
        monkeypatch.setattr(launcher, "find", lambda module=module: launcher.Found(module, ""))
        execute, told[way] = load(plan, [x, *others], runtime), []
        stand_in.set("map_count", 0)
        for k, first in enumerate([x, misaligned, shifted, x, misaligned, shifted]):
            runtime.used = begin
            stand_in.set("record_count", 0)
            execute([first, *others], None, [n + k for n in numbers])
            told[way] += stand_in.launched if k >= 3 else []  # the first launch of each variant is CuPy's
    names = {way: [runtime.functions[each.function].name for each in found] for way, found in told.items()}
    assert names["python"] == names["compiled"] and len(names["python"]) >= 3
    without = {way: [each._replace(function=0) for each in found] for way, found in told.items()}
    assert without["python"] == without["compiled"]
    assert (stand_in.get("map_count") > 0) == (function is head)


def results(x: Any, bias: Any, weight: Any) -> Any:
    y = x @ weight.T + bias
    return np.tanh(y), y.astype("float32")


@pytest.mark.parametrize("rows", [1, 40])
def test_results_at_any_address_launch_the_same(
    gpu: tuple[Gpu, DriverStandIn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int
) -> None:
    """The tensor map of a result is that of its address, of more addresses than are kept; none if it is not aligned."""
    (runtime, stand_in), dtype, cols = gpu, ml_dtypes.bfloat16, 96
    given = [runtime.empty(shape, dtype) for shape in ((rows, 64), (cols,), (cols, 64))]
    kinds = np.dtype(dtype), np.dtype(np.float32)
    memory = [runtime.empty((rows * cols + 8 * 80,), kind) for kind in kinds]
    with settings.epilogues("always"):
        plan = cf.fuse(results).plan(*given)
    assert [step.by_tiles for step in plan.steps] == [True]
    begins = [(0, 0), (1, 0), (0, 3), *((8 * k, 8 * (79 - k)) for k in range(80)), (8, 4), (0, 0), (5, 2)]
    told: dict[str, list[bytes]] = {}
    for way, module in (("python", None), ("compiled", load_launcher(tmp_path))):
        monkeypatch.setattr(launcher, "find", lambda module=module: launcher.Found(module, ""))
        execute, told[way] = load(plan, given, runtime), []
        for count, places in enumerate([(0, 0), *begins]):  # the first launch is CuPy's
            outs = [m[k : k + rows * cols].reshape(rows, cols) for m, k in zip(memory, places, strict=True)]
            stand_in.set("record_count", 0)
            execute(given, outs)
            told[way] += [each.packed for each in stand_in.launched] if count else []
    assert told["python"] == told["compiled"] and len(told["python"]) == len(begins)
    for packed, places in zip(told["compiled"], begins, strict=True):
        words = np.frombuffer(packed, np.uint64)
        for at, m, k, across in zip((32, 48), memory, places, (32, 32), strict=True):
            address, itemsize = m.ctypes.data + k * m.itemsize, m.itemsize
            encoded = [address, cols, rows, cols * itemsize, across, 16] if address % 16 == 0 else [0] * 6
            assert words[at + 2 : at + 8].tolist() == encoded
