"""The compiled launcher: what it tells the driver is what Python's launches tell it, byte by byte, and it is safe.

`test_launch.py` runs on both.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver_stand_in import LAUNCHER, DriverStandIn, load_launcher
from host_cuda.library import sanitizer_environment
from support import HELPERS, ROOT

from cupyfuse.cuda import driver, launcher, tensor_map
from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.structs import KernelCall, Struct, StructLaunch, TensorMap, integers, number, pointer
from cupyfuse.cuda.structs import tensor_map as map_member
from cupyfuse.cuda.tensor_map import MatrixBoxes
from cupyfuse.errors import EngineError
from cupyfuse.ir.numbers import Number

STREAM, NUMBERS = 1 << 45, 4  # the stream, and the slot of the float arguments
KERNELS: dict[int, ctypes.c_uint64] = {}  # by their handles, which the stand-in reads the sizes of structs at


class Function:
    """A kernel's function; `called` counts the calls that are CuPy's own."""

    def __init__(self) -> None:
        self._size = ctypes.c_uint64()
        self.ptr = ctypes.addressof(self._size)
        self.called = 0
        KERNELS[self.ptr] = self._size

    def __call__(self, *arguments: Any) -> None:
        self.called += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """CuPy and a driver, for a GPU of compute capability 9.0; `device.number` is the current device."""
    found = SimpleNamespace(number=0, driver=DriverStandIn(sized=True))
    runtime = SimpleNamespace(getDevice=lambda: found.number, driverGetVersion=lambda: 13000)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda _: SimpleNamespace(compute_capability="90"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    for module in (driver, tensor_map):
        monkeypatch.setattr(module, "driver", lambda: found.driver)
    driver._takes_early_launches.cache_clear()
    yield found
    driver._takes_early_launches.cache_clear()
    found.driver.call_directly()
    KERNELS.clear()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The compiled launcher, in force."""
    found = load_launcher(tmp_path)
    monkeypatch.setattr(launcher, "find", lambda: launcher.Found(found, ""))
    return found


def in_python(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    with monkeypatch.context() as context:
        context.setattr(launcher, "find", lambda: launcher.Found(None, ""))
        return sequence(launches)


def struct_launch(layout: Struct, kernels: int = 1, **alignment: Any) -> StructLaunch:
    calls = [KernelCall(Function(), (k + 1, 2, 3), (32 * (k + 1), 1, 1), 16 * k) for k in range(kernels)]
    for call in calls:
        KERNELS[call.function.ptr].value = 8 * len(layout.members)
    return StructLaunch(calls, layout, **alignment)


def simple(**alignment: Any) -> StructLaunch:
    half = Number("x / 2", lambda numbers: numbers[0] / 2, lambda: 0.0)
    return struct_launch(pointer(0, 16) + integers(-3) + number(0.0, half, 1), **alignment)


# The same as Python's ------------------------------------------------------------------------------------------------


class RandomLaunches:
    """Launches of random structs, and addresses for them; `log` notes what they call."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.log = rng, []
        self.launches = [self._launch(k) for k in range(rng.integers(1, 5))]

    def _launch(self, number: int) -> Any:
        rng = self.rng
        if rng.random() < 0.2:
            return lambda at, stream: self.log.append((number, list(at), stream))
        layout = Struct()
        for _ in range(rng.integers(1, 12)):
            layout += self._member(int(rng.integers(6)))
        checked = [(slot, start) for _, slot, start in layout.pointers if rng.random() < 0.5]

        def otherwise(at: Any, stream: Any) -> None:
            self.log.append((number, "otherwise", stream))

        alignment = int(rng.choice([1, 4, 16]))
        return struct_launch(layout, int(rng.integers(1, 4)), aligned=checked, alignment=alignment, otherwise=otherwise)

    def _member(self, kind: int) -> Struct:
        rng = self.rng
        if kind == 0:
            return integers(*(int(n) for n in rng.integers(-(1 << 62), 1 << 62, rng.integers(1, 4))))
        if kind == 1:
            return number(float(rng.standard_normal()))
        if kind == 2:
            factor = float(rng.standard_normal())
            return number(0.0, Number("x", lambda numbers: numbers[0] * factor, lambda: 0.0), NUMBERS)
        if kind == 3:
            return self._tensor_map()
        return pointer(int(rng.integers(4)), int(rng.choice([0, 0, 4, 64, -8, 1 << 33])))

    def _tensor_map(self) -> Struct:
        rng, slot, start = self.rng, int(self.rng.integers(4)), int(self.rng.choice([0, 16, 2]))
        lines, length = (int(n) for n in rng.integers(1, 1000, 2))
        dtype = str(rng.choice(["float16", "bfloat16"]))
        matrix = MatrixBoxes(lines, length, 16 * -(-length * 2 // 16), (int(rng.integers(1, 257)), 64), dtype)

        def encode(at: Any) -> Any:
            address = at[slot] + start
            self.log.extend([("copied", address)] if address % 16 else [])
            return array("Q", tensor_map.encode(matrix, address // 16 * 16)), object()

        return map_member(TensorMap(encode, slot, start, matrix if rng.random() < 0.7 else None))

    def addresses(self) -> list[Any]:
        step = int(self.rng.choice([1, 4, 16, 16]))
        found: list[Any] = [int(n) * step for n in self.rng.integers(1 << 10, 1 << 43, NUMBERS)]
        return [*found, [float(self.rng.standard_normal())]]


def test_random_structs_are_those_of_python(
    device: Any, module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    for _ in range(300):
        case = RandomLaunches(rng)
        ways = in_python(case.launches, monkeypatch), sequence(case.launches)
        for way in ways:  # the first of a thread, and of a function, are CuPy's
            way(case.addresses(), STREAM)
        for _ in range(4):
            addresses, told = case.addresses(), []
            for way in ways:
                case.log.clear()
                device.driver.set("record_count", 0)
                way(addresses, STREAM)
                told.append((device.driver.launched, list(case.log)))
            assert told[0] == told[1]
            seen |= {entry[0] if isinstance(entry[0], str) else str(entry[1])[:9] for entry in told[0][1]}
            seen |= {f"{len(told[0][0])} launches"}
    assert {"copied", "otherwise", "0 launches", "6 launches"} <= seen


def test_threads_and_devices_begin_in_python(device: Any, module: Any) -> None:
    """CuPy's own launch makes a device's context current: once for all plans of a thread."""
    launches = [simple() for _ in range(3)]
    functions = [sequence([each]) for each in launches[:2]]
    device.number = 63
    functions.append(sequence([launches[2]]))

    def counts(*order: int) -> list[int]:
        for k in order:
            functions[k]([64, [1.0]], STREAM)
        return [each.kernels[0].function.called for each in launches]

    assert counts(0, 1, 0, 1) == [1, 0, 0]
    assert counts(2, 2, 0) == [1, 0, 1]
    thread = threading.Thread(target=counts, args=(1, 0, 2))
    thread.start()
    thread.join()
    assert counts() == [1, 1, 2]
    assert len(device.driver.launched) == 6


def test_a_device_beyond_those_that_are_counted_is_pythons(device: Any, module: Any) -> None:
    device.number = 64
    launch = sequence([simple()])
    assert type(launch) is type(simple)
    launch([64, [1.0]], STREAM)
    launch([64, [1.0]], STREAM)
    assert len(device.driver.launched) == 1


def test_what_the_driver_refuses_to_encode_is_pythons_error(device: Any, module: Any) -> None:
    matrix = MatrixBoxes(3, 8, 16, (64, 64), "float16")
    source = TensorMap(lambda at: (array("Q", tensor_map.encode(matrix, at[0])), None), 0, 0, matrix)
    launch = sequence([struct_launch(map_member(source))])
    launch([64], STREAM)
    launch([64], STREAM)
    assert device.driver.get("map_count") == 2
    device.driver.set("encode_status", 1)
    with pytest.raises(EngineError, match="cuTensorMapEncodeTiled failed with status 1 for MatrixBoxes"):
        launch([64], STREAM)
    assert len(device.driver.launched) == 1


def test_copies_of_operands_live_until_the_launch(device: Any, module: Any) -> None:
    copies: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Memory:
        pass

    def encode(at: Any) -> Any:
        memory = Memory()
        copies.append(weakref.ref(memory))
        return array("Q", range(16)), memory

    def note(at: Any = None, stream: Any = None) -> None:
        alive.append(copies[-1]() is not None)

    launch = sequence([struct_launch(map_member(TensorMap(encode))), note])
    launch([], STREAM)
    device.driver.during = note
    launch([], STREAM)
    assert alive == [False, True, False]
    assert struct.unpack("=16Q", device.driver.launched[0].packed) == tuple(range(16))


def test_a_launch_within_the_evaluation_of_a_number(device: Any, module: Any) -> None:
    """As by a finalizer, which may run wherever Python code does."""
    inner = sequence([simple()])

    def evaluate(numbers: Any) -> float:
        inner([320, [8.0]], STREAM)
        return float(numbers[0])

    outer = sequence([struct_launch(pointer(0) + number(0.0, Number("x", evaluate, lambda: 0.0), 1) + integers(7))])
    outer([64, [2.0]], STREAM)
    device.driver.set("record_count", 0)
    outer([128, [3.0]], STREAM)
    found = [each.packed for each in device.driver.launched]
    assert found == [struct.pack("=Qqd", 336, -3, 4.0), struct.pack("=Qdq", 128, 3.0, 7)]


# Safety --------------------------------------------------------------------------------------------------------------


def wrong_arguments() -> list[tuple[tuple[Any, ...], type[Exception]]]:
    good = [64, [1.0]]
    return [
        ((), TypeError),
        ((good,), TypeError),
        ((good, STREAM, 1), TypeError),
        ((tuple(good), STREAM), TypeError),
        ((None, STREAM), TypeError),
        (([], STREAM), IndexError),
        (([64], STREAM), IndexError),
        (([None, [1.0]], STREAM), TypeError),
        (([64.0, [1.0]], STREAM), TypeError),
        ((["64", [1.0]], STREAM), TypeError),
        (([-64, [1.0]], STREAM), OverflowError),
        (([1 << 64, [1.0]], STREAM), OverflowError),
        (([(1 << 64) - 1, [1.0]], STREAM), OverflowError),  # 16 bytes from there
        (([64, None], STREAM), TypeError),
        (([64, []], STREAM), IndexError),
        (([64, ["x"]], STREAM), TypeError),
        ((good, -1), OverflowError),
        ((good, 1 << 64), OverflowError),
    ]


@pytest.mark.parametrize(("arguments", "error"), wrong_arguments(), ids=repr)
def test_wrong_arguments_raise(device: Any, module: Any, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    launch: Any = sequence([simple()])
    launch([64, [1.0]], STREAM)
    with pytest.raises(error):
        launch(*arguments)
    assert not device.driver.launched
    launch([80, [2.0]], STREAM)
    assert [each.packed for each in device.driver.launched] == [struct.pack("=Qqd", 96, -3, 1.0)]


@pytest.mark.parametrize("start", [-65, 8])
def test_members_of_no_address_raise(device: Any, module: Any, start: int) -> None:
    launch = sequence([struct_launch(pointer(0, start))])
    launch([128], STREAM)
    with pytest.raises(OverflowError):
        launch([64 if start < 0 else (1 << 64) - 8], STREAM)


@pytest.mark.parametrize("pair", [None, (), (range(16),), (range(15), None), (["x"] * 16, None), ([-1] * 16, None)])
def test_wrong_tensor_maps_raise(device: Any, module: Any, pair: Any) -> None:
    found: list[Any] = [(array("Q", range(16)), None)]
    launch = sequence([struct_launch(map_member(TensorMap(lambda at: found[0])))])
    launch([], STREAM)
    found[0] = pair
    with pytest.raises((TypeError, IndexError, OverflowError)):
        launch([], STREAM)
    assert not device.driver.launched


def test_a_list_that_changes_during_a_launch(device: Any, module: Any) -> None:
    at: list[Any] = [64, [1.0]]

    def evaluate(numbers: Any) -> float:
        at.clear()
        gc.collect()
        return float(numbers[0])

    launch = sequence([struct_launch(number(0.0, Number("x", evaluate, lambda: 0.0), 1) + pointer(0)), simple()])
    launch([*at], STREAM)
    at[:] = [64, [1.0]]
    with pytest.raises(IndexError):
        launch(at, STREAM)
    assert len(device.driver.launched) == 1


VALID = [
    ("HEADER", 1, 1, 0, 1, 0),
    ("STRUCT", 0, 20, 0, 0, 0),
    ("POINTER", 0, 0, 0, 0, 0),
    ("CHECK", 0, 0, 0, 0, 0),
    ("ALIGNED", 15, 0, 8, 0, 0),
    ("NUMBER", 1, 0, 0, 0, 0),
    ("MAP", 2, 0, 0, 0, 0),
    ("LAUNCH", 160, 1, 0, 0, 0),
    ("CALL", 0, 0, 0, 0, 0),
]
DATA = bytes(200)


def packed(steps: list[Any]) -> bytes:
    return b"".join(struct.pack("=6q", launcher._OPS.index(op), *operands) for op, *operands in steps)


@pytest.mark.parametrize(
    ("step", "operand", "value"),
    [(0, 0, 0), (0, 1, 0), (0, 2, -1), (0, 2, 64), (1, 0, -1), (1, 0, 41), (1, 1, 26), (1, 1, -1), (1, 1, 4097)]
    + [(1, 1, 1 << 61), (2, 0, -1), (2, 0, 4096), (3, 0, 4096), (4, 1, 2), (4, 2, 4), (4, 2, 10), (4, 2, -1)]
    + [(5, 0, 4096), (5, 2, 2), (6, 0, 4081), (6, 3, 129), (6, 3, -2), (6, 4, 2), (7, 0, 161), (7, 0, -8), (8, 0, 2)],
)
def test_programs_are_checked(module: Any, step: int, operand: int, value: int) -> None:
    objects = (print, EngineError)
    module.compile(packed(VALID), DATA, objects)
    steps = [list(each) for each in VALID]
    steps[step][operand + 1] = value
    with pytest.raises(ValueError, match="program is not valid"):
        module.compile(packed(steps), DATA, objects)


def test_programs_of_another_form_are_refused(module: Any) -> None:
    objects = (print, EngineError)
    for steps, data, values, error in [
        (b"", DATA, objects, ValueError),
        (packed(VALID)[:-8], DATA, objects, ValueError),
        (packed(VALID[1:]), DATA, objects, ValueError),
        (packed([*VALID, VALID[0]]), DATA, objects, ValueError),
        (struct.pack("=6q", 9, *[0] * 5), DATA, objects, ValueError),
        (packed(VALID), DATA, (print,), ValueError),
        (packed(VALID), DATA, (print, 1), ValueError),
        (packed(VALID), DATA, [*objects], TypeError),
        (packed(VALID), bytearray(DATA), objects, TypeError),
        (1, DATA, objects, TypeError),
    ]:
        with pytest.raises(error):
            module.compile(steps, data, values)


def test_structs_of_the_most_members(device: Any, module: Any, rng: np.random.Generator) -> None:
    device.driver = DriverStandIn(2048)
    values = [int(n) for n in rng.integers(0, 1 << 60, 4096)]
    launch = sequence([StructLaunch([KernelCall(Function(), (1, 1, 1), (1, 1, 1))], integers(*values))])
    launch([], STREAM)
    launch([], STREAM)
    assert device.driver.launched[0].packed == struct.pack("=256q", *values[:256])
    with pytest.raises(ValueError):
        sequence([StructLaunch([KernelCall(Function(), (1, 1, 1), (1, 1, 1))], integers(*values, 1))])


def test_nothing_is_leaked(device: Any, module: Any) -> None:
    """Neither references nor memory, by launches and by failures."""
    device.driver.call_directly()
    words, memory, result, log = array("Q", range(1000, 1016)), object(), 2.5e300, []
    launches: list[Any] = [
        struct_launch(
            map_member(TensorMap(lambda at: (words, memory)))
            + pointer(0)
            + number(0.0, Number("x", lambda numbers: result * len(numbers), lambda: 0.0), 1),
            aligned=[(0, 0)],
            alignment=16,
            otherwise=lambda at, stream: log.append(at) or log.clear(),
        ),
        lambda at, stream: None,
    ]
    launch = sequence(launches)
    good, bad, odd = [1 << 40, [1.5]], [1 << 40, 3], [(1 << 40) + 8, [1.5]]
    counted = [good, bad, odd, good[0], good[1], words, memory, result, launch, EngineError, None, *launches, STREAM]

    def rounds(count: int) -> None:
        for _ in range(count):
            launch(good, STREAM)
            launch(odd, STREAM)
            for arguments in ((bad, STREAM), ([], STREAM), (good, -1)):
                with contextlib.suppress(TypeError, IndexError, OverflowError):
                    launch(*arguments)

    rounds(10_000)  # touches the memory that the stand-in notes launches in
    gc.collect()
    before, references = resident(), [sys.getrefcount(value) for value in counted]
    rounds(40_000)
    gc.collect()
    after = [sys.getrefcount(value) for value in counted]
    assert all(abs(a - b) < 10 for a, b in zip(after, references, strict=True)), (references, after)
    assert resident() - before < 1 << 20


def resident() -> int:
    """Bytes of memory that the process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_launch_is_freed_with_what_it_calls(device: Any, module: Any) -> None:
    class Callable:
        def __call__(self, at: Any, stream: Any) -> None: ...

    gc.disable()
    try:
        called: Any = Callable()
        launch: Any = sequence([simple(), called])
        references = [weakref.ref(called), weakref.ref(launch)]
        del called, launch
        assert [reference() for reference in references] == [None, None]
        called = Callable()
        called.launch = sequence([simple(), called])  # a cycle
        reference = weakref.ref(called)
        del called
    finally:
        gc.enable()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("file", "select", "passed"),
    [
        ("tests/cuda/test_launcher.py", "not address_sanitizer and not leaked and not installed", r"[67]\d"),
        ("tests/api/test_direct_calls.py", "wrong or checked or while_it or freed", r"2\d"),
    ],
)
def test_it_runs_clean_under_address_sanitizer(file: str, select: str, passed: str) -> None:
    environment = {**os.environ, **sanitizer_environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", select]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(rf"{passed} passed", done.stdout), done.stdout


# What launches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Have the import of the launcher give a module, or raise an error."""
    found: list[Any] = []

    def import_module(name: str) -> Any:
        assert name == launcher.MODULE
        if isinstance(found[-1], Exception):
            raise found[-1]
        return found[-1]

    monkeypatch.setattr(launcher.importlib, "import_module", import_module)
    monkeypatch.delenv(launcher.VARIABLE, raising=False)
    launcher.find.cache_clear()
    yield found.append
    launcher.find.cache_clear()


def test_an_installed_launcher_is_used(imported: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load_launcher(tmp_path)
    imported(module)
    for choice in ("", "compiled"):
        monkeypatch.setenv(launcher.VARIABLE, choice)
        launcher.find.cache_clear()
        assert launcher.find() == (module, f"cupyfuse_launcher, interface {launcher._INTERFACE}")
    monkeypatch.setenv(launcher.VARIABLE, "python")
    launcher.find.cache_clear()
    assert launcher.find() == (None, "CUPYFUSE_LAUNCHER is set")


def test_a_missing_launcher_leaves_launches_to_python(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(ModuleNotFoundError("no such module"))
    assert launcher.find() == (None, "cupyfuse-launcher is not installed")
    monkeypatch.setenv(launcher.VARIABLE, "compiled")
    launcher.find.cache_clear()
    with pytest.raises(EngineError, match="CUPYFUSE_LAUNCHER asks for the compiled launcher: it is not installed"):
        launcher.find()
    monkeypatch.setenv(launcher.VARIABLE, "rust")
    with pytest.raises(EngineError, match="expected one of compiled, python"):
        launcher.find()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SimpleNamespace(INTERFACE=0), "its interface is 0, expected 1"),
        (SimpleNamespace(), "its interface is None"),
        (ImportError("undefined symbol"), "cannot be imported: undefined symbol"),
    ],
)
def test_a_launcher_that_does_not_fit_is_told(
    imported: Any, monkeypatch: pytest.MonkeyPatch, module: Any, reason: str
) -> None:
    imported(module)
    with pytest.warns(RuntimeWarning, match=reason):
        assert launcher.find().module is None
    assert reason in launcher.find().reason
    monkeypatch.setenv(launcher.VARIABLE, "compiled")
    launcher.find.cache_clear()
    with pytest.raises(EngineError, match=reason):
        launcher.find()


def test_it_can_be_installed(tmp_path: Path) -> None:
    """By setuptools: one module for all versions of Python, whose steps are those that are written here."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path / "build", "--build-lib", tmp_path]
    done = subprocess.run(command, cwd=LAUNCHER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cupyfuse_launcher.abi3.so").exists()
    code = "import cupyfuse_launcher as found; print(found.INTERFACE)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(shown.stdout) == launcher._INTERFACE
    ops = re.search(r"enum Op \{(.*?)\};", (LAUNCHER / "launches.c").read_text(), re.DOTALL)
    assert ops is not None and tuple(re.findall(r"^ +([A-Z]+),", ops[1], re.MULTILINE)) == launcher._OPS
