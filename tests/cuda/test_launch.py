"""Launches: what the driver is told, in every thread, and while another launch is under way."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_stand_in import DriverStandIn, load_launcher

from cupyfuse.cuda import driver, launch_graph, launcher
from cupyfuse.cuda.gemm import ForeignBlas
from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.launch_graph import LaunchGraph
from cupyfuse.cuda.structs import KernelCall, Launch, StructLaunch, TensorMap, integers, number, pointer, tensor_map
from cupyfuse.cuda.tensor_map import WORDS
from cupyfuse.errors import EngineError
from cupyfuse.ir.numbers import Number

GRID, BLOCK, FORM = (5, 1, 1), (64, 1, 1), "Qqd"
STREAM = 77
HANDLE = 1234
NUMBERS = 1  # the slot of the float arguments
HALF = Number("x / 2", lambda numbers: numbers[0] / 2, lambda: 0.0)
STRUCT = pointer(0, 16) + integers(-3) + number(0.0, HALF, NUMBERS)


def launch_of(function: Any, shared: int = 0, **alignment: Any) -> Launch:
    """A launch of one kernel, given an address and a float."""
    return sequence([StructLaunch([KernelCall(function, GRID, BLOCK, shared)], STRUCT, **alignment)])


def members(address: int, value: float) -> tuple[Any, ...]:
    return address + 16, -3, value / 2


class Device:
    """CuPy as far as launches need it: what is launched, and by which way; its GPU and driver are of some version."""

    def __init__(self, capability: str, version: int, way: str) -> None:
        self.way = way
        self.plain: list[tuple[Any, ...]] = []
        self._by_cupy: list[tuple[Any, ...]] = []
        self._status = 0
        self.driver = DriverStandIn(struct.calcsize("=" + FORM))
        self.cuda = SimpleNamespace(
            driver=SimpleNamespace(launchKernel=self._quickly),
            runtime=SimpleNamespace(getDevice=lambda: 0, driverGetVersion=lambda: version),
            Device=lambda _: SimpleNamespace(compute_capability=capability),
        )

    def during(self, action: Callable[[], int | None]) -> None:
        """Have something happen while the next launch is under way; it may return a status of the driver's."""
        self.driver.during = action

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
        """CuPy's `launchKernel`."""
        grid, block, (shared, stream, address, extra) = rest[:3], rest[3:6], rest[6:]
        assert (handle, extra) == (HANDLE, 0)
        if self.driver._call_during():
            raise EngineError("CuPy's error of the driver")
        self._by_cupy.append((grid, block, self.members_at(address), shared, stream))

    @property
    def early(self) -> list[tuple[Any, ...]]:
        """The launches that may begin before the one before them has ended."""
        return self._of_driver(with_attributes=True)

    @property
    def quick(self) -> list[tuple[Any, ...]]:
        """The others on streams but for a thread's first: by CuPy's function, or the launcher's call of the driver."""
        done = self._of_driver(with_attributes=False)
        assert not done or self.way == "compiled"
        assert not self._by_cupy or self.way == "python"
        return self._by_cupy + done

    def _of_driver(self, with_attributes: bool) -> list[tuple[Any, ...]]:
        found = [each for each in self.driver.launched if bool(each.attributes) == with_attributes]
        assert all(each.function == HANDLE and each.attributes in ({}, {6: 1}) for each in found)
        return [(f.grid, f.block, struct.unpack("=" + FORM, f.packed), f.shared, f.stream) for f in found]

    def members_at(self, address: int) -> tuple[Any, ...]:
        """Read the struct that a pointer at an address points to."""
        packed = ctypes.c_void_p.from_address(address).value
        return struct.unpack("=" + FORM, ctypes.string_at(packed or 0, struct.calcsize("=" + FORM)))


@pytest.fixture(params=["python", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What launches."""
    module = load_launcher(tmp_path) if request.param == "compiled" else None
    monkeypatch.setattr(launcher, "find", lambda: launcher.Found(module, "a test"))
    return str(request.param)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, way: str) -> Iterator[Callable[..., Device]]:
    devices: list[Device] = []

    def device_of(capability: str, version: int = 13000) -> Device:
        found = Device(capability, version, way)
        devices.append(found)
        monkeypatch.setitem(sys.modules, "cupy", found)
        monkeypatch.setitem(sys.modules, "cupy.cuda", found.cuda)
        monkeypatch.setattr(driver, "driver", lambda: found.driver)
        driver._takes_early_launches.cache_clear()
        return found

    yield device_of
    driver._takes_early_launches.cache_clear()
    for each in devices:
        each.driver.call_directly()


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
    launch = launch_of(device.function(), 16)
    for k in range(3):
        launch([k, [0.5]], STREAM)
    expected = [(GRID, BLOCK, members(k, 0.5), 16, 77) for k in (1, 2)]
    assert (device.early, device.quick) == ((expected, []) if early else ([], expected))
    assert len(device.plain) == 1


def test_an_early_launch_that_the_driver_refuses_is_an_error(install: Callable[..., Device]) -> None:
    device = install("90")
    launch = launch_of(device.function())
    launch([0, [0.0]], STREAM)
    device.during(lambda: 700)
    with pytest.raises(EngineError, match="cuLaunchKernelEx failed with status 700"):
        launch([1, [1.0]], STREAM)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_a_launch_within_a_launch_spoils_no_arguments(install: Callable[..., Device], capability: str) -> None:
    device = install(capability)
    launch = launch_of(device.function())
    launch([0, [0.0]], STREAM)
    device.during(lambda: launch([2, [2.0]], STREAM))
    launch([1, [1.0]], STREAM)
    launch([3, [3.0]], STREAM)
    done = device.early + device.quick  # the inner one first
    assert [arguments for _, _, arguments, _, _ in done] == [members(k, float(k)) for k in (2, 1, 3)]
    assert [arguments for _, _, arguments, _, _ in device.plain] == [members(0, 0.0)]


def test_the_first_launch_of_a_thread_is_cupys_own(device: Device) -> None:
    launch = launch_of(device.function(), 16)
    for k in range(3):
        launch([k, [0.5]], STREAM)
    assert device.plain == [(GRID, BLOCK, members(0, 0.5), 16, SimpleNamespace(ptr=77))]
    assert device.quick == [(GRID, BLOCK, members(k, 0.5), 16, 77) for k in (1, 2)]
    thread = threading.Thread(target=lambda: [launch([k, [1.5]], STREAM) for k in (8, 9)])
    thread.start()
    thread.join()
    assert device.plain[1:] == [(GRID, BLOCK, members(8, 1.5), 16, SimpleNamespace(ptr=77))]
    assert device.quick[2:] == [(GRID, BLOCK, members(9, 1.5), 16, 77)]


def test_a_first_launch_that_fails_is_made_by_cupy_again(device: Device) -> None:
    function = device.function()
    failures = [RuntimeError("no context")]

    class Failing:
        ptr = HANDLE

        def __call__(self, *arguments: Any) -> None:
            if failures:
                raise failures.pop()
            function(*arguments)

    launch = launch_of(Failing())
    with pytest.raises(RuntimeError, match="no context"):
        launch([1, [1.0]], STREAM)
    launch([2, [2.0]], STREAM)
    launch([3, [3.0]], STREAM)
    assert [arguments for _, _, arguments, _, _ in device.plain] == [members(2, 2.0)]
    assert [arguments for _, _, arguments, _, _ in device.quick] == [members(3, 3.0)]


def test_each_launch_goes_to_its_own_stream(device: Device) -> None:
    launch = launch_of(device.function())
    for stream in (0, 77, 0, 1 << 47, 77):
        launch([0, [0.0]], stream)
    assert [stream for *_, stream in device.quick] == [77, 0, 1 << 47, 77]


def test_early_launches_go_to_their_own_streams(install: Callable[..., Device]) -> None:
    device = install("90")
    launch = launch_of(device.function())
    for stream in (0, 77, 0, 1 << 47, 77):
        launch([0, [0.0]], stream)
    assert [stream or 0 for *_, stream in device.early] == [77, 0, 1 << 47, 77]


def test_without_a_stream_cupys_current_one_is_used(device: Device) -> None:
    launch = launch_of(device.function())
    for _ in range(3):
        launch([1, [3.0]], None)
    assert device.plain == [(GRID, BLOCK, members(1, 3.0), 0, None)] * 3 and not device.quick


@pytest.mark.parametrize("capability", ["80", "90"])
def test_a_launch_that_fails_leaves_the_next_one_whole(install: Callable[..., Device], capability: str) -> None:
    device = install(capability)
    launch = launch_of(device.function())
    launch([0, [0.0]], STREAM)
    device.during(lambda: 700)
    with pytest.raises(EngineError):
        launch([1, [1.0]], STREAM)
    with pytest.raises(TypeError):  # once the address is filled in
        launch([5, ["x"]], STREAM)
    for k in (2, 3):
        launch([k, [float(k)]], STREAM)
    done = [*device.plain, *device.quick, *device.early]
    assert [arguments for _, _, arguments, _, _ in done] == [members(k, float(k)) for k in (0, 2, 3)]


def test_kernels_of_other_runtimes_are_called(device: Device) -> None:
    launch = launch_of(device.function(ptr=0), 8)
    for k in (1, 2):
        launch([k, [3.0]], 7)
    assert device.plain == [(GRID, BLOCK, members(k, 3.0), 8, SimpleNamespace(ptr=7)) for k in (1, 2)]
    assert not device.quick and not device.early


def test_addresses_that_are_not_aligned_take_the_other_launch(device: Device) -> None:
    others: list[Any] = []

    def launch_other(addresses: Any, stream: Any) -> None:
        others.append((*addresses, stream))

    launch = launch_of(device.function(), aligned=[(0, 16)], alignment=32, otherwise=launch_other)
    for k in (16, 32, 48, 17, 80):
        launch([k, [1.0]], STREAM)
    assert others == [(32, [1.0], STREAM), (17, [1.0], STREAM)]
    done = [arguments[0] for _, _, arguments, _, _ in (*device.plain, *device.quick)]
    assert done == [32, 64, 96]


def test_a_plan_launches_in_its_order(device: Device) -> None:
    """Kernels that share a struct, products between them, tensor maps whose memory lives until the launch."""
    alive: list[bool] = []
    copies: list[weakref.ref[Any]] = []

    class Memory:
        """A copy of an operand that was not aligned."""

    def map_operand(addresses: Any) -> Any:
        held = Memory()
        copies.append(weakref.ref(held))
        return words, held

    words = memoryview(struct.pack(f"{WORDS}Q", *range(WORDS))).cast("Q")
    order: list[Any] = []
    function = device.function()

    class Noting:
        ptr = 0

        def __call__(self, grid: Any, block: Any, arguments: Any, shared: int, stream: Any) -> None:
            alive.append(copies[-1]() is not None)
            order.append((grid, struct.unpack(f"={WORDS}Qqq", arguments[0].tobytes())))

    mapped = StructLaunch(
        [KernelCall(Noting(), (k, 1, 1), BLOCK) for k in (1, 2)],
        tensor_map(TensorMap(map_operand)) + integers(5, -6),
    )

    def product(addresses: Any, stream: Any) -> None:
        alive.append(copies[-1]() is not None)
        order.append((addresses[0], stream))

    sequence([mapped, product, StructLaunch([KernelCall(function, GRID, BLOCK)], STRUCT)])([7, [2.0]], 3)
    expected = (*range(WORDS), 5, -6)
    assert order == [((1, 1, 1), expected), ((2, 1, 1), expected), (7, 3)]
    assert alive == [True, True, False]
    assert [arguments for _, _, arguments, _, _ in device.plain] == [members(7, 2.0)]


def test_a_graph_records_launches(device: Device) -> None:
    added: list[Any] = []

    class Graph(LaunchGraph):
        def __init__(self) -> None:
            """Without a driver."""

        def add(self, handle: int, grid: Any, block: Any, shared: int, arguments: int) -> None:
            added.append((handle, grid, block, shared, device.members_at(arguments)))

    launch = launch_of(device.function(), 4)
    for k in (1, 2):
        launch([k, [0.5]], Graph())
    assert added == [(HANDLE, GRID, BLOCK, 4, members(k, 0.5)) for k in (1, 2)]
    assert not device.plain and not device.quick


@pytest.mark.parametrize("early", [False, True])
def test_launches_of_a_graph_follow_each_other(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the one before it; where that may begin early, for all blocks of it to have begun."""
    nodes: list[tuple[int, int]] = []  # of each node the handle of the kernel, and the node that it waits for
    edges: list[tuple[int, int, bytes]] = []

    def add_kernel(node: Any, graph: Any, after: Any, count: int, params: Any) -> int:
        node._obj.value = len(nodes) + 1
        nodes.append((params._obj.function, after._obj.value if count else 0))
        return 0

    def add_edges(graph: Any, start: Any, end: Any, data: Any, count: Any) -> int:
        edges.append((start._obj.value, end._obj.value, bytes(data._obj)))
        return 0

    calls = dict.fromkeys(("cuGraphCreate", "cuGraphInstantiateWithFlags", "cuGraphDestroy"), lambda *_: 0)
    calls |= {"cuGraphAddKernelNode": add_kernel, "cuGraphAddDependencies_v2": add_edges}
    monkeypatch.setattr(launch_graph, "driver", lambda: SimpleNamespace(**calls))
    monkeypatch.setattr(launch_graph, "takes_early_launches", lambda: early)
    graph = LaunchGraph()
    for handle in (11, 12, 13):
        graph.add(handle, GRID, BLOCK, 0, 0)
    graph.finish(None)
    assert nodes == [(11, 0), (12, 0 if early else 1), (13, 0 if early else 2)]
    assert edges == (
        [(1, 2, bytes([1, 0, 1, 0, 0, 0, 0, 0])), (2, 3, bytes([1, 0, 1, 0, 0, 0, 0, 0]))] if early else []
    )


def test_threads_at_once_have_structs_of_their_own(device: Device) -> None:
    launch, count = launch_of(device.function()), 300

    def work(base: int) -> None:
        for k in range(count):
            launch([base + k, [float(base + k)]], STREAM)

    threads = [threading.Thread(target=work, args=(10_000 * t,)) for t in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    done = [arguments for _, _, arguments, _, _ in (*device.plain, *device.quick)]
    assert sorted(done) == [members(10_000 * t + k, float(10_000 * t + k)) for t in range(4) for k in range(count)]


def test_a_missing_cublas_is_named(device: Device) -> None:
    device.cuda.runtime = SimpleNamespace(memsetAsync=None)
    with pytest.raises(EngineError, match=r"cuBLAS.*not found.*libnothing\.so"):
        ForeignBlas(lambda: 0, "libnothing.so")
    with pytest.raises(EngineError, match="cublasSetStream"):
        ForeignBlas(lambda: 0, ctypes.util.find_library("c") or "libc.so.6")
