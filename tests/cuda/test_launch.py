"""Launches: what the driver is told, in every thread, and while another launch is under way."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cupyfuse.cuda import driver
from cupyfuse.cuda.gemm import ForeignBlas
from cupyfuse.cuda.launch import launcher
from cupyfuse.errors import EngineError

GRID, BLOCK, FORM = (5, 1, 1), (64, 1, 1), "Qqd"
STREAM = SimpleNamespace(ptr=77)
HANDLE = 1234


class Device:
    """CuPy as far as launches need it: what is launched, and by which way; its GPU and driver are of some version."""

    def __init__(self, capability: str, version: int) -> None:
        self.plain: list[tuple[Any, ...]] = []
        self.quick: list[tuple[Any, ...]] = []
        self.early: list[tuple[Any, ...]] = []
        self.during: Any = None  # what happens while a launch is under way
        self.status = 0  # of early launches
        self.cuda = SimpleNamespace(
            driver=SimpleNamespace(launchKernel=self._quickly),
            runtime=SimpleNamespace(getDevice=lambda: 0, driverGetVersion=lambda: version),
            Device=lambda _: SimpleNamespace(compute_capability=capability),
        )

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
        assert (handle, extra) == (HANDLE, 0)
        self.quick.append((grid, block, self._members(address), shared, stream))

    def cuLaunchKernelEx(self, config: Any, handle: Any, arguments: Any, extra: None) -> int:
        """As the driver reads it: `CUlaunchConfig` by the offsets of its members."""
        raw = bytes(config._obj)
        *dims, shared, _, stream, attributes, count = struct.unpack_from("=8IQQI", raw)
        assert count == 1 and struct.unpack("=3i", ctypes.string_at(attributes, 12)) == (6, 0, 1)
        assert (handle.value, extra) == (HANDLE, None)
        members = self._members(ctypes.addressof(arguments._obj))
        self.early.append((tuple(dims[:3]), tuple(dims[3:]), members, shared, stream))
        return self.status

    def _members(self, address: int) -> tuple[Any, ...]:
        """Read the struct that a pointer at an address points to, once what happens meanwhile has happened."""
        if self.during:
            during, self.during = self.during, None
            during()
        packed = ctypes.c_void_p.from_address(address).value
        return struct.unpack("=" + FORM, ctypes.string_at(packed or 0, struct.calcsize("=" + FORM)))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Device]:
    def device_of(capability: str, version: int = 13000) -> Device:
        found = Device(capability, version)
        monkeypatch.setitem(sys.modules, "cupy", found)
        monkeypatch.setitem(sys.modules, "cupy.cuda", found.cuda)
        monkeypatch.setattr(driver, "driver", lambda: found)
        driver._takes_early_launches.cache_clear()
        return found

    return device_of


@pytest.fixture
def device(install: Callable[..., Device]) -> Device:
    return install("80")


@pytest.mark.parametrize(
    ("capability", "version", "early"), [("90", 12030, 2), ("120", 13000, 2), ("89", 13000, 0), ("90", 12020, 0)]
)
def test_launches_begin_early_where_gpu_and_driver_can(
    install: Callable[..., Device], capability: str, version: int, early: int
) -> None:
    device = install(capability, version)
    launch = launcher(device.function(), GRID, BLOCK, FORM, 16)
    for k in range(3):
        launch((k, -k, 0.5), STREAM)
    expected = [(GRID, BLOCK, (k, -k, 0.5), 16, 77) for k in (1, 2)]
    assert (device.early, device.quick) == ((expected, []) if early else ([], expected))
    assert len(device.plain) == 1


def test_an_early_launch_that_the_driver_refuses_is_an_error(install: Callable[..., Device]) -> None:
    device = install("90")
    launch = launcher(device.function(), GRID, BLOCK, FORM)
    launch((0, 0, 0.0), STREAM)
    device.status = 700
    with pytest.raises(EngineError, match="cuLaunchKernelEx failed with status 700"):
        launch((1, 1, 1.0), STREAM)


def test_an_early_launch_within_a_launch_spoils_no_arguments(install: Callable[..., Device]) -> None:
    device = install("90")
    launch = launcher(device.function(), GRID, BLOCK, FORM)
    launch((0, 0, 0.0), STREAM)
    device.during = lambda: launch((2, 2, 2.0), STREAM)
    launch((1, 1, 1.0), STREAM)
    assert [members for _, _, members, _, _ in device.early] == [(1, 1, 1.0)]
    assert [members for _, _, members, _, _ in device.plain] == [(0, 0, 0.0), (2, 2, 2.0)]


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
