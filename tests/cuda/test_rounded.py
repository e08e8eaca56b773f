"""Products of float32 operands in one fp16 part: split, cuBLAS's product, factors or repair; on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine

from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.split import inverse_at, padded
from cupyfuse.cuda.split_launch import RoundedProduct, Split
from cupyfuse.cuda.structs import pointer
from cupyfuse.ir.products import split_shape

F32 = np.float32
TINY, MAX = F32(2.0**-126), np.finfo(F32).max


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def runtime_of(device: Engine) -> Any:
    from cupyfuse.cuda.runtime import on_device

    return on_device(0) if device is CUDA else device.runtime


def laid(device: Engine, x: Any, by: str) -> Any:
    return device.array(x) if by == "rows" else device.array(np.ascontiguousarray(x.T)).T


def split(device: Engine, matrix: Any) -> Any:
    """The memory that holds a split matrix; poisoned before."""
    runtime = runtime_of(device)
    memory = device.xp.empty(split_shape(matrix.shape, 1), np.float16)
    memory[...] = np.nan
    launch = Split(*matrix.shape, (matrix.strides[0] // 4, matrix.strides[1] // 4), parts=1).launch(runtime, 0, 1)
    sequence([launch])([runtime.address(matrix), runtime.address(memory)], runtime.stream())
    return memory


@pytest.mark.parametrize("cols", [33, 1024, 1025])
@pytest.mark.parametrize("processors", [1, 128])
def test_splits_by_columns_find_room_before_hopper(cols: int, processors: int) -> None:
    """A block has at most 99 KB on an RTX 4090 and an L40S; a few are the kernel's own."""
    kernel = Split(70, cols, (1, 70), parts=1, processors=processors).kernel
    assert kernel.shared <= 64 << 10 and kernel.cluster == 1


def unpacked(memory: Any, rows: int, cols: int) -> tuple[Any, Any, Any]:
    """(elements, inverse scales, how many elements are small), padding columns included."""
    raw = memory.reshape(-1).view(np.uint8)
    at = inverse_at(rows, cols, 1)
    bits = raw[at : at + 4 * rows].view(np.uint32)
    inverse = (bits & 0x7F800000).view(F32)
    elements = raw[:at].view(np.float16).reshape(-1, padded(cols))
    return elements, np.where(inverse == np.inf, np.nan, inverse), bits & 0x7FFFFF


def product(device: Engine, a: Any, b: Any, by: str = "rows") -> Any:
    """The product as the engine makes it, written over NaN, with its factors."""
    runtime = runtime_of(device)
    left, right = laid(device, a, by), laid(device, b, by)
    result = device.xp.empty((left.shape[0], right.shape[0]), F32)
    result[...] = np.nan
    parts = [split(device, m) for m in (left, right)]
    strides = [tuple(s // 4 for s in m.strides) for m in (left, right)]
    multiply = RoundedProduct((*result.shape, left.shape[1]), *strides, runtime.processors)
    at = runtime.address
    factors = [device.xp.empty(n, F32) for n in (result.shape[0], result.shape[0], result.shape[1])]
    for factor in factors:
        factor[...] = np.nan
    addresses = [at(array) for array in (*parts, left, right, result, *factors)]
    multiply.launch(runtime, (0, 1), (pointer(2), pointer(3)), 4, (5, 6, 7))(addresses, runtime.stream())
    row, rest, column = map(device.host, factors)
    with np.errstate(all="ignore"):
        found: Any = ((device.host(result) * row[:, None]) * column) * rest[:, None]
    return found


def error(actual: Any, a: Any, b: Any) -> float:
    """max |error| / (|a| |b|'), where there is something to divide by."""
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
        size = np.abs(a) @ np.abs(b).T
        return float((np.abs(actual - a @ b.T) / np.where(size > 0, size, 1)).max())


# Two operands rounded to 11 bits, and float32 sums.
def bound(depth: int) -> float:
    return 2 * 2.0**-11 + 2.0**-22 + depth * 2.0**-23


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 64), (9, 65), (17, 200), (2, 9000), (70, 33), (33, 130)])
@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("scale", [1, 2.0**100, 2.0**-100])
def test_a_part_holds_11_bits(
    device: Engine, shape: tuple[int, int], by: str, scale: float, rng: np.random.Generator
) -> None:
    x = (rng.standard_normal(shape) * scale).astype(F32)
    x[rng.random(shape) < 0.1] = 0
    elements, inverse, small = unpacked(device.host(split(device, laid(device, x, by))), *shape)
    rows, cols = shape
    assert (elements[:rows, cols:] == 0).all() and (np.frexp(inverse)[0] == 0.5).all() and not small.any()
    again = elements[:rows, :cols].astype(np.float64) * inverse[:, None].astype(np.float64)
    assert (np.abs(again - x) <= 2.0**-11 * np.abs(x)).all()


SHAPES = [(1, 1, 3), (3, 5, 70), (130, 9, 129), (65, 170, 64), (8, 64, 200), (1, 300, 65), (129, 1, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "scaled", "zeros", "tiny"])
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_products_are_as_exact_as_tf32(
    device: Engine, kind: str, shape: tuple[int, int, int], by: str, rng: np.random.Generator
) -> None:
    m, n, k = shape
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    if kind == "scaled":
        a *= 2.0 ** rng.integers(-60, 60, (m, 1))
        b *= 2.0 ** rng.integers(-60, 60, (n, 1))
    if kind == "zeros":
        a[rng.random(a.shape) < 0.5] = 0
        a[:: max(1, m // 3)] = 0
    if kind == "tiny":
        a = np.sign(a) * rng.choice([TINY, TINY * 3, TINY * 2**20], a.shape)
    a, b = a.astype(F32), b.astype(F32)
    assert error(product(device, a, b, by), a, b) <= bound(k)


@pytest.mark.parametrize("spread", [10, 40, 120])
def test_rows_of_many_magnitudes(device: Engine, spread: int, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s) * 2.0 ** rng.integers(-spread, 1, s) for s in ((20, 150), (30, 150)))
    b[:, rng.random(150) < 0.7] = 0
    a, b = a.astype(F32), b.astype(F32)
    assert error(product(device, a, b), a, b) <= bound(150)


def test_small_elements_count_where_nothing_else_does(device: Engine, rng: np.random.Generator) -> None:
    """The large elements of a row meet zeros, or cancel: the product is that of elements which fp16 barely holds."""
    a, b = np.zeros((5, 140), F32), np.zeros((4, 140), F32)
    a[:, 3], a[:, 7] = 1e15, rng.standard_normal(5)
    b[0, 7], b[1, 7], b[1, 3], b[2, 5], b[3, 3], b[3, 4], b[3, 7] = 1.25, 3e-5, 1e-30, 1, 1, 1, 1
    a[:, 4] = -1e15
    a[4] = 0
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for result in (product(device, a, b), product(device, b, a).T):
        np.testing.assert_allclose(result[:, :3], expected[:, :3], rtol=2 * 2.0**-11)


def test_what_needs_repair_is_as_float32_and_disturbs_nothing(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((40, 150), (135, 150)))
    before = product(device, a, b)
    a[3, 7], a[11, 0], a[39, 149], a[20, 3] = np.inf, np.nan, 1e-30, 1e-30  # the last meets an infinity
    b[0, 7], b[5, 3], b[134, 20] = 0, -np.inf, 1e-35
    after = product(device, a, b)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64).T
    good = np.ix_([i for i in range(40) if i not in (3, 11, 20, 39)], [j for j in range(135) if j not in (0, 5, 134)])
    assert (before[good] == after[good]).all(), "rows that need no repair keep their bits"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(after[~finite], expected[~finite])
    size = np.abs(np.nan_to_num(a, posinf=0, neginf=0)) @ np.abs(np.nan_to_num(b, posinf=0, neginf=0)).T
    assert (np.abs(after[finite] - expected[finite]) <= bound(150) * size[finite]).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_one_row_that_needs_repair(device: Engine, value: float) -> None:
    a, b = np.ones((5, 70), F32), np.ones((9, 70), F32)
    a[3, 60] = value
    for result in (product(device, a, b), product(device, b, a).T):
        np.testing.assert_array_equal(result[3], np.full(9, value, F32))
        assert (np.delete(result, 3, axis=0) == 70).all()


def test_results_at_the_ends_of_the_exponents(device: Engine) -> None:
    """Scales are undone in two steps: nothing overflows or underflows on the way that the result itself does not."""
    a, b = np.full((2, 64), 2.0**120, F32), np.full((3, 64), 2.0**-120, F32)
    assert (product(device, a, b) == 64).all()
    assert (product(device, a, a) == np.inf).all() and (product(device, b, b) == 0).all()
    large, less = np.full((3, 64), 2.0**126, F32), np.full((2, 64), 2.0**-20, F32)
    assert (product(device, less, large) == 2.0**112).all() and (product(device, large, less) == 2.0**112).all()
    tiny = np.full((3, 64), 2.0**-72, F32)
    np.testing.assert_array_equal(product(device, tiny, tiny), F32(2.0**-138))


def test_an_operand_of_misaligned_rows_and_an_odd_result(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(F32) for s in ((37, 77), (131, 77)))
    assert error(product(device, a, b), a, b) <= bound(77)
    again = product(device, np.concatenate([a, a])[:37], b)
    assert (again == product(device, a, b)).all()
