"""The compiled launcher tells the driver what Python tells it, byte by byte; `test_launch.py` runs on both."""

from __future__ import annotations

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
from driver_stand_in import LAUNCHER, load_launcher
from launcher_cases import STREAM, simple, struct_launch

from cupyfuse.cuda import launcher, tensor_map
from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.structs import Struct, TensorMap, integers, number, pointer
from cupyfuse.cuda.structs import tensor_map as map_member
from cupyfuse.cuda.tensor_map import MatrixBoxes
from cupyfuse.errors import EngineError
from cupyfuse.ir.numbers import Number

NUMBERS = 4  # the slot of the float arguments


def in_python(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    with monkeypatch.context() as context:
        context.setattr(launcher, "find", lambda: launcher.Found(None, ""))
        return sequence(launches)


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
        across, itemsize = ((64, 2), (32, 4), (16, 2))[rng.integers(3)]
        box = int(rng.integers(1, 257)), across
        matrix = MatrixBoxes(lines, length, 16 * -(-length * itemsize // 16), box, itemsize)

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
    matrix = MatrixBoxes(3, 8, 16, (64, 64))
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
        (SimpleNamespace(INTERFACE=0), f"its interface is 0, expected {launcher._INTERFACE}"),
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
