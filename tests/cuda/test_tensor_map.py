"""Tensor maps: what the driver is asked for, by a stand-in that takes the arguments as `cuda.h` declares them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from support import CUDA

import cupyfuse as cf
from cupyfuse.cuda import driver, tensor_map
from cupyfuse.cuda.tensor_map import BOX, WORDS, MatrixBoxes, encode

U32, U64 = ctypes.c_uint32, ctypes.c_uint64


class Driver:
    """cuTensorMapEncodeTiled without the rest."""

    def __init__(self, status: int = 0):
        self.status = status
        self.asked: dict[str, Any] = {}

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        where, kind, rank, address, sizes, strides, box, steps, *modes = arguments
        assert where % 64 == 0, "the driver refuses other places"
        self.asked = {
            "kind": kind,
            "rank": rank,
            "address": address,
            "sizes": list(sizes),
            "strides": list(strides),
            "box": list(box),
            "steps": list(steps),
            "modes": modes,
        }
        (U64 * WORDS).from_address(where)[:] = range(WORDS)
        return self.status


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(status: int = 0) -> Driver:
        stand_in = Driver(status)
        monkeypatch.setattr(tensor_map, "driver", lambda: stand_in)
        return stand_in

    return install


@pytest.mark.parametrize(
    ("itemsize", "kind", "across", "swizzle"),
    [(2, 1, 64, 3), (2, 1, 16, 1), (4, 2, 16, 2), (4, 2, 32, 3)],
)
def test_a_matrix_is_described_from_its_lines(
    driver_of: Any, itemsize: int, kind: int, across: int, swizzle: int
) -> None:
    asked = driver_of()
    assert encode(MatrixBoxes(300, 72, 160, (128, across), itemsize), 0x7000) == tuple(range(WORDS))
    assert asked.asked == {
        "kind": kind,
        "rank": 2,
        "address": 0x7000,
        "sizes": [72, 300],  # the innermost first
        "strides": [160],  # bytes, of all but the innermost
        "box": [across, 128],
        "steps": [1, 1],
        # No interleaving, swizzled by the bytes of a box's line, promoted to 256 bytes of L2, filled with zeros.
        "modes": [0, swizzle, 3, 0],
    }


def test_a_refusal_says_what_was_asked(driver_of: Any) -> None:
    driver_of(status=1)
    with pytest.raises(
        cf.EngineError, match=r"status 1 for MatrixBoxes\(lines=3.* at address 0x7002: .*multiples of 16"
    ):
        encode(MatrixBoxes(3, 8, 16, (64, BOX)), 0x7002)


def test_the_constants_are_those_of_the_header() -> None:
    """CUtensorMapDataType and the other enumerations count from 0."""
    types = ["UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
    assert {size: types.index(f"UINT{8 * size}") for size in tensor_map._TYPES} == tensor_map._TYPES
    swizzles = ["NONE", "32B", "64B", "128B"]
    assert {size: swizzles.index(f"{size}B") for size in (32, 64, 128)} == tensor_map._SWIZZLES
    assert ["NONE", "L2_64B", "L2_128B", "L2_256B"].index("L2_256B") == tensor_map._PROMOTE_256B


def test_a_driver_without_tensor_maps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver.driver.cache_clear()
    old = SimpleNamespace(**{n: SimpleNamespace() for n in ("cuGraphCreate", "cuGraphAddKernelNode")})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    with pytest.raises(cf.EngineError, match="the CUDA driver was not found"):
        driver.driver()
    driver.driver.cache_clear()


@pytest.mark.gpu
def test_the_driver_takes_it() -> None:
    CUDA.require()
    import cupy

    if cupy.cuda.Device().compute_capability < "90":
        pytest.skip("needs a GPU with tensor maps")

    array = cupy.zeros((40, 64), cupy.float16)
    words = encode(MatrixBoxes(40, 64, 128, (8, BOX)), array.data.ptr)
    assert len(words) == WORDS and any(words)
    with pytest.raises(cf.EngineError, match="cuTensorMapEncodeTiled failed"):
        encode(MatrixBoxes(40, 64, 130, (8, BOX)), array.data.ptr)
