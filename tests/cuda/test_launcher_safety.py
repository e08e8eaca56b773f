"""The compiled launcher with wrong arguments and programs, and what it holds and frees."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_stand_in import DriverStandIn
from host_cuda.library import sanitizer_environment
from launcher_cases import STREAM, Function, simple, struct_launch
from support import HELPERS, ROOT

from cupyfuse.cuda import launcher
from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.structs import KernelCall, StructLaunch, TensorMap, integers, number, pointer
from cupyfuse.cuda.structs import tensor_map as map_member
from cupyfuse.errors import EngineError
from cupyfuse.ir.numbers import Number

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


def test_a_launch_that_blocks_lets_other_threads_run(device: Any, module: Any) -> None:
    """A full stream may wait for what another thread does in Python, as a host function."""
    launch = sequence([simple()])
    launch([64, [1.0]], STREAM)
    device.driver.block()

    def release() -> None:
        while not device.driver.get("waiting"):
            time.sleep(0.001)
        device.driver.set("released", 1)

    thread = threading.Thread(target=release)
    thread.start()
    try:
        launch([64, [1.0]], STREAM)
    finally:
        thread.join()
    assert len(device.driver.launched) == 1


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
    rounds(120_000)  # a float each would take 4 MB
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


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("file", "select", "passed"),
    [
        ("tests/cuda/test_launcher.py", "not installed", r"1\d"),
        ("tests/cuda/test_launcher_safety.py", "not address_sanitizer and not leaked", r"[56]\d"),
        ("tests/api/test_direct_calls.py", "wrong or checked or while_it or freed", r"2\d"),
    ],
)
def test_it_runs_clean_under_address_sanitizer(file: str, select: str, passed: str) -> None:
    paths = f"{ROOT}{os.pathsep}{HELPERS}"
    environment = {**os.environ, **sanitizer_environment(), "PYTHONPATH": paths, "CUPYFUSE_ALL_TESTS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", select]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(rf"{passed} passed", done.stdout), done.stdout
