"""Launches: what the driver is told, in every thread, and while another launch is under way."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cupyfuse.cuda.gemm import ForeignBlas
from cupyfuse.cuda.launch import launcher
from cupyfuse.errors import EngineError

GRID, BLOCK, FORM = (5, 1, 1), (64, 1, 1), "Qqd"
STREAM = SimpleNamespace(ptr=77)
HANDLE = 1234


class Device:
    """CuPy as far as launches need it: what is launched, and by which way."""

    def __init__(self) -> None:
        self.plain: list[tuple[Any, ...]] = []
        self.quick: list[tuple[Any, ...]] = []
        self.during: Any = None  # what happens while a launch is under way
        self.cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=self._quickly))

    def function(self, ptr: int = HANDLE) -> Any:
        device = self

        class Function:
            def __call__(self, grid: Any, block: Any, arguments: Any, shared: int, stream: Any) -> None:
                device.plain.append((grid, block, struct.unpack("=" + FORM, arguments[0].tobytes()), shared, stream))

        function = Function()
        if ptr:
            function.ptr = ptr  # type: ignore[attr-defined]
        return function

    def _quickly(self, handle: int, *rest: int) -> None:
        grid, block, (shared, stream, address, extra) = rest[:3], rest[3:6], rest[6:]
        if self.during:
            during, self.during = self.during, None
            during()
        packed = ctypes.c_void_p.from_address(address).value
        members = struct.unpack("=" + FORM, ctypes.string_at(packed or 0, struct.calcsize("=" + FORM)))
        assert (handle, extra) == (HANDLE, 0)
        self.quick.append((grid, block, members, shared, stream))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setitem(sys.modules, "cupy.cuda", found.cuda)
    return found


def test_the_first_launch_of_a_thread_is_cupys_own(device: Device) -> None:
    launch = launcher(device.function(), GRID, BLOCK, FORM, 16)
    for k in range(3):
        launch((k, -k, 0.5), STREAM)
    assert device.plain == [(GRID, BLOCK, (0, 0, 0.5), 16, STREAM)]
    assert device.quick == [(GRID, BLOCK, (k, -k, 0.5), 16, 77) for k in (1, 2)]
    thread = threading.Thread(target=lambda: [launch((k, k, 1.5), STREAM) for k in (8, 9)])
    thread.start()
    thread.join()
    assert device.plain[1:] == [(GRID, BLOCK, (8, 8, 1.5), 16, STREAM)]
    assert device.quick[2:] == [(GRID, BLOCK, (9, 9, 1.5), 16, 77)]


def test_a_launch_within_a_launch_spoils_no_arguments(device: Device) -> None:
    launch = launcher(device.function(), GRID, BLOCK, FORM)
    launch((0, 0, 0.0), STREAM)
    device.during = lambda: launch((2, 2, 2.0), STREAM)
    launch((1, 1, 1.0), STREAM)
    assert [members for _, _, members, _, _ in device.quick] == [(1, 1, 1.0)]
    assert [members for _, _, members, _, _ in device.plain] == [(0, 0, 0.0), (2, 2, 2.0)]


def test_without_a_stream_cupys_current_one_is_used(device: Device) -> None:
    launch = launcher(device.function(), GRID, BLOCK, FORM)
    for _ in range(3):
        launch((1, 2, 3.0), None)
    assert device.plain == [(GRID, BLOCK, (1, 2, 3.0), 0, None)] * 3 and not device.quick


def test_a_launch_that_fails_leaves_the_next_one_whole(device: Device) -> None:
    def fail() -> None:
        raise RuntimeError("no luck")

    launch = launcher(device.function(), GRID, BLOCK, FORM)
    launch((0, 0, 0.0), STREAM)
    device.during = fail
    with pytest.raises(RuntimeError, match="no luck"):
        launch((1, 1, 1.0), STREAM)
    for k in (2.0, 3.0):
        launch((2, 2, k), STREAM)
    assert [members for _, _, members, _, _ in (*device.plain, *device.quick)] == [
        (0, 0, 0.0),
        (2, 2, 2.0),
        (2, 2, 3.0),
    ]


def test_kernels_of_other_runtimes_are_called(device: Device) -> None:
    launch = launcher(device.function(ptr=0), GRID, BLOCK, FORM, 8)
    launch((1, 2, 3.0), None)
    assert device.plain == [(GRID, BLOCK, (1, 2, 3.0), 8, None)]


def test_a_missing_cublas_is_named(device: Device) -> None:
    device.cuda.runtime = SimpleNamespace(memsetAsync=None)
    with pytest.raises(EngineError, match=r"cuBLAS.*not found.*libnothing\.so"):
        ForeignBlas(lambda: 0, "libnothing.so")
    with pytest.raises(EngineError, match="cublasSetStream"):
        ForeignBlas(lambda: 0, ctypes.util.find_library("c") or "libc.so.6")
