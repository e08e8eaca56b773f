"""Products from fp16 halves: splitting, product and repair, by their kernels on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import CUDA, HOST, Engine

from cupyfuse.cuda import split as split_kernels
from cupyfuse.cuda import split_launch
from cupyfuse.cuda.launch import sequence
from cupyfuse.cuda.split_launch import Split, SplitProduct
from cupyfuse.cuda.structs import integers, pointer
from cupyfuse.ir.products import split_shape
from cupyfuse.plan.schedule.split_tiles import TILE_WIDTHS, tile_width

F32 = np.float32
Change = Callable[[Any, int, int], None]  # of the memory of a split, given the rows and columns of its matrix
BF16 = ml_dtypes.bfloat16
TINY, MAX = F32(2.0**-126), np.finfo(F32).max


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    if request.param is CUDA and not hopper():
        pytest.skip("needs a GPU with Hopper's tensor cores")
    with request.param.active():
        yield request.param


def hopper() -> bool:
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def runtime_of(device: Engine) -> Any:
    from cupyfuse.cuda.runtime import on_device

    return on_device(0) if device is CUDA else device.runtime


def split(device: Engine, matrix: Any, processors: int = 1) -> Any:
    """The memory that holds the halves of a matrix; poisoned before."""
    runtime = runtime_of(device)
    memory = device.xp.empty(split_shape(matrix.shape), np.float16)
    memory[...] = np.nan
    strides = matrix.strides[0] // 4, matrix.strides[1] // 4
    launch = Split(*matrix.shape, strides, processors=processors).launch(runtime, 0, 1)
    sequence([launch])([runtime.address(matrix), runtime.address(memory)], runtime.stream())
    return memory


def transposed(device: Engine, x: Any, layout: str = "contiguous") -> Any:
    """The matrix with its columns side by side in memory, each a row of another one of this layout."""
    return device.array(np.ascontiguousarray(x.T), layout).T


def laid(device: Engine, x: Any, by: str) -> Any:
    return device.array(x) if by == "rows" else transposed(device, x)


BY = pytest.mark.parametrize("by", ["rows", "columns"])


def unpacked(memory: Any, rows: int, cols: int) -> tuple[Any, Any, Any, Any]:
    """(high, low, inverse scales, how many elements are small) as the layout has them, padding included."""
    raw = memory.reshape(-1).view(np.uint8)
    at = split_kernels.inverse_at(rows, cols)
    bits = raw[at : at + 4 * rows].view(np.uint32)
    small, inverse = bits & 0x1FFFFF, (bits & 0x7F800000).view(F32)
    groups, blocks = -(-rows // 8), -(-cols // 64)
    atoms = raw[:at].view(np.float16).reshape(blocks, 2, groups, 8, 8, 8)  # pieces of 8 columns, in a swizzled order
    row, piece = np.arange(8)[:, None], np.arange(8)[None, :]
    atoms = atoms[:, :, :, row, piece ^ row, :]
    parts = atoms.transpose(1, 2, 3, 0, 4, 5).reshape(2, groups * 8, blocks * 64)
    has_lo = (parts[1].reshape(-1, blocks, 64) != 0).any(axis=2).T
    assert (blocks_with_lo(memory, rows, cols) == has_lo).all(), "where lo is not zero"
    finite = (bits >> 31 == 0) & (inverse != np.inf)
    for bit, expected in ((1 << 22, has_lo[:, :rows].any(axis=0)), (1 << 21, has_lo[:, :rows].all(axis=0))):
        assert ((bits & bit != 0) == expected)[finite].all(), "what a row's scale says of that"
    return parts[0], parts[1], np.where(inverse == np.inf, np.nan, inverse), small


def lo_marks(memory: Any, rows: int, cols: int) -> Any:
    """The bytes that say where lo is not zero, for each block of 64 columns and row, padding included."""
    groups, blocks = -(-rows // 8), -(-cols // 64)
    at = split_kernels.inverse_at(rows, cols) + 4 * groups * 8
    return memory.reshape(-1).view(np.uint8)[at : at + blocks * groups * 8].reshape(blocks, groups * 8)


def blocks_with_lo(memory: Any, rows: int, cols: int) -> Any:
    """Where lo is not zero, of each block of 64 columns and row: rows that have it everywhere may have no marks."""
    found = lo_marks(memory, rows, cols) != 0
    at = split_kernels.inverse_at(rows, cols)
    bits = memory.reshape(-1).view(np.uint8)[at : at + 4 * rows].view(np.uint32)
    everywhere = (bits >> 31 == 0) & (bits & 0x7F800000 != 0x7F800000) & (bits & 1 << 21 != 0)
    found[:, np.flatnonzero(everywhere)] = True
    return found


def rows_of(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Any:
    x = rng.standard_normal(shape)
    if kind == "scaled":
        x *= 2.0 ** rng.integers(-100, 100, (shape[0], 1))
    if kind == "zeros":
        x[rng.random(shape) < 0.5] = 0
        x[:: max(1, shape[0] // 3)] = 0
    if kind == "extremes":
        x = np.sign(x) * rng.choice([MAX, MAX / 2**20, 2.0**100], shape)
    if kind == "tiny":
        x = np.sign(x) * rng.choice([TINY, TINY * 3, TINY * 2**20], shape)
    return x.astype(F32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 64), (9, 65), (17, 200), (5, 1000), (2, 9000), (70, 33)])
@pytest.mark.parametrize("kind", ["normal", "scaled", "zeros", "extremes", "tiny"])
@BY
def test_halves_hold_22_bits(
    device: Engine, kind: str, shape: tuple[int, int], by: str, rng: np.random.Generator
) -> None:
    x = rows_of(rng, kind, shape)
    high, low, inverse, small = unpacked(device.host(split(device, laid(device, x, by))), *shape)
    rows, cols = shape
    assert (high[rows:] == 0).all() and (low[rows:] == 0).all()
    assert (high[:, cols:] == 0).all() and (low[:, cols:] == 0).all()
    assert (np.frexp(inverse)[0] == 0.5).all(), "powers of two"
    sums = high.astype(np.float64) + low.astype(np.float64) / 2048
    again = sums[:rows, :cols] * inverse.astype(np.float64)[:, None]
    scaled = np.abs(x) / inverse.astype(np.float64)[:, None]
    assert (np.abs(again - x) / inverse[:, None] <= np.maximum(2.0**-22 * scaled, 2.0**-36)).all()
    assert (small == ((scaled > 0) & (scaled < 2.0**-14)).sum(axis=1)).all()
    top = np.abs(high[:rows].astype(np.float64)).max(axis=1)
    reach = top * inverse == np.abs(x).astype(np.float64).max(axis=1)
    assert ((top >= 2.0**13) | (np.abs(x).max(axis=1) < 2.0**-112) | (top == 0)).all() or reach.all()


@pytest.mark.parametrize(
    ("shape", "clusters"), [((3, 130), (4, 4, 4)), ((40, 515), (2, 4, 8)), ((33, 2050), (2, 4, 8))]
)
@pytest.mark.parametrize("kind", ["normal", "scaled", "zeros", "tiny"])
def test_clusters_split_columns_as_single_blocks_do(
    device: Engine, kind: str, shape: tuple[int, int], clusters: tuple[int, ...], rng: np.random.Generator
) -> None:
    if device is CUDA and not hopper():
        pytest.skip("needs a GPU with clusters")
    x = rows_of(rng, kind, shape)
    x[-1, -1] = 0 if kind == "tiny" else np.inf
    given = transposed(device, x)
    alone = device.host(split(device, given)).view(np.uint16)
    for processors in (4, 8, 132):
        assert (
            split_kernels.column_cluster(*shape, 2, processors) == min(processors // 2 // (shape[0] // 33 + 1), 8) or 1
        )
        np.testing.assert_array_equal(device.host(split(device, given, processors)).view(np.uint16), alone)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@BY
def test_rows_that_halves_cannot_hold_are_marked(device: Engine, value: float, by: str) -> None:
    x = np.ones((4, 70), F32)
    x[2, 61] = value
    high, low, inverse, small = unpacked(device.host(split(device, laid(device, x, by))), *x.shape)
    assert np.isnan(inverse).tolist() == [False, False, True, False] and not small[[0, 1, 3]].any()
    assert (high[2] == 0).all() and (low[2] == 0).all() and (high[[0, 1, 3], :70] != 0).all()


@pytest.mark.parametrize("values", [[1, 2.0**-29, 0], [MAX, TINY, 1], [1e-40, 0, 0], [1e-38, 1e-42, 1e-45]])
@BY
def test_small_elements_are_counted(device: Engine, values: list[float], by: str) -> None:
    x = np.zeros((3, 70), F32)
    x[1, 60:63] = values
    high, low, inverse, small = unpacked(device.host(split(device, laid(device, x, by))), *x.shape)
    again = (high + low.astype(np.float64) / 2048)[1, 60:63] * inverse.astype(np.float64)[1]
    assert (np.abs(again - x[1, 60:63]) <= 2.0**-36 * inverse[1].astype(np.float64) + 2.0**-22 * np.abs(again)).all()
    scaled = np.abs(x[1].astype(np.float64)) / inverse[1]
    assert small.tolist() == [0, ((scaled > 0) & (scaled < 2.0**-14)).sum(), 0]


@pytest.mark.parametrize("layout", ["row_gap", "offset", "contiguous"])
def test_rows_that_lie_apart_or_misaligned(device: Engine, layout: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 130)).astype(F32)
    one, other = (device.host(split(device, device.array(x, how))) for how in (layout, "contiguous"))
    for a, b in zip(unpacked(one, *x.shape), unpacked(other, *x.shape), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("layout", ["row_gap", "offset", "contiguous"])
@pytest.mark.parametrize("shape", [(1, 1), (40, 3), (31, 64), (33, 130), (7, 1100), (300, 70)])
def test_columns_are_split_as_rows_of_a_copy(
    device: Engine, shape: tuple[int, int], layout: str, rng: np.random.Generator
) -> None:
    x = rows_of(rng, "scaled", shape)
    x[:, 0] *= 2.0**-40
    one = device.host(split(device, transposed(device, x, layout)))
    other = device.host(split(device, device.array(x)))
    for a, b in zip(unpacked(one, *shape), unpacked(other, *shape), strict=True):
        assert (a == b).all()


def product(
    device: Engine, a: Any, b: Any, operands: Any = None, change: Change | None = None, processors: int = 0
) -> Any:
    """The product as the engine makes it, written over NaN; `change` may alter the split of each operand before."""
    runtime = runtime_of(device)
    left, right = operands or (device.array(a), device.array(b))
    result = device.xp.empty((left.shape[0], right.shape[0]), F32)
    result[...] = np.nan
    tiles = [split(device, device.array(m)) for m in (a, b)]
    if change is not None:
        for memory, matrix in zip(tiles, (a, b), strict=True):
            altered = device.host(memory)
            change(altered, *matrix.shape)
            memory[...] = device.array(altered)
    strides = [tuple(s // 4 for s in m.strides) for m in (left, right)]
    vec = 2 if result.shape[1] % 2 == 0 else 1
    multiply = SplitProduct((*result.shape, left.shape[1]), *strides, processors or runtime.processors, vec=vec)
    at = runtime.address
    workspace = runtime.workspace(multiply.workspace)
    launch = multiply.launch(runtime, (0, 1), (pointer(2), pointer(3)), 4, pointer(5) + integers(result.shape[1]))
    addresses = [*(at(t) for t in tiles), at(left), at(right), workspace.ptr, at(result)]
    sequence([launch])(addresses, runtime.stream())
    return device.host(result)


def error(actual: Any, a: Any, b: Any) -> float:
    """max |error| / (|a| |b|'), where there is something to divide by."""
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
        size = np.abs(a) @ np.abs(b).T
        return float((np.abs(actual - a @ b.T) / np.where(size > 0, size, 1)).max())


# In the last there are more blocks of columns than stages.
SHAPES = [(1, 1, 64), (3, 5, 70), (130, 9, 129), (65, 170, 64), (8, 64, 200), (9, 12, 700)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "scaled", "zeros", "tiny"])
def test_products_are_float32(device: Engine, kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, n, k = shape
    a, b = rows_of(rng, kind, (m, k)), rng.standard_normal((n, k)).astype(F32)
    # Two representations of 22 bits, the dropped product of both low parts, sums over 64 columns.
    assert error(product(device, a, b), a, b) <= 3 * 2.0**-22


@pytest.mark.rotates
def test_several_tiles_for_each_block(device: Engine, rng: np.random.Generator) -> None:
    """Each row and column with a scale of its own, fewer blocks of columns than stages, and more; in many orders."""
    for m, n, k, processors in ((130, 337, 64, 1), (260, 338, 400, 3)):
        a, b = (rng.standard_normal(s) * 2.0 ** rng.integers(-30, 30, (s[0], 1)) for s in ((m, k), (n, k)))
        a, b = a.astype(F32), b.astype(F32)
        result = product(device, a, b, processors=processors)
        assert error(result, a, b) <= 3 * 2.0**-22
        for _ in range(8 // processors):
            np.testing.assert_array_equal(product(device, a, b, processors=processors), result)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("row", [0, 250, 519])
def test_small_elements_count_in_every_tile(device: Engine, row: int, rng: np.random.Generator) -> None:
    a, b = (np.abs(rng.standard_normal(shape)).astype(F32) for shape in ((520, 70), (338, 70)))
    a[row, 0], b[:, 0] = 1e15, 0
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for result in (product(device, a, b), product(device, b, a).T):
        np.testing.assert_allclose(result, expected, rtol=3 * 2.0**-22)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("width", TILE_WIDTHS)
def test_doubts_in_tiles_of_every_width(
    device: Engine, width: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Sums that are small beside the elements of a row, and infinite columns, in pairs and single elements."""
    monkeypatch.setattr(split_launch, "tile_width", lambda *_: width)
    a, b = (np.abs(rng.standard_normal(shape)).astype(F32) for shape in ((130, 70), (340, 70)))
    a[::3, 0], b[:, 0], b[7::50, 1] = 1e15, 0, np.inf
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    pairs, single = product(device, a, b), product(device, a, b[:339])
    np.testing.assert_allclose(pairs, expected, rtol=3 * 2.0**-22)
    np.testing.assert_array_equal(pairs[:, :339].view(np.uint32), single.view(np.uint32))


def test_rows_of_one_element(device: Engine, rng: np.random.Generator) -> None:
    """What they choose keeps 22 bits after the first: a quarter of float32 numbers lose their last one."""
    a, b = np.zeros((40, 600), F32), rng.standard_normal((70, 600)).astype(F32)
    chosen = rng.permutation(600)[:40]
    a[np.arange(40), chosen] = np.sign(rng.standard_normal(40)) * 2.0 ** rng.integers(-30, 30, 40)
    expected = (a[np.arange(40), chosen] * b[:, chosen]).T
    for result in (product(device, a, b), product(device, b, a).T):
        assert (np.abs(result - expected) <= np.spacing(np.abs(expected))).all()
        assert 0.2 < (result != expected).mean() < 0.3
    short = b.astype(BF16).astype(F32)
    exact = (a[np.arange(40), chosen] * short[:, chosen]).T
    np.testing.assert_array_equal(product(device, a, short), exact)
    a *= 1 + rng.standard_normal((40, 1)).astype(F32) / 4
    assert error(product(device, a, b), a, b) <= 3 * 2.0**-22


def everywhere(memory: Any, rows: int, cols: int) -> None:
    lo_marks(memory, rows, cols)[...] = 1


def nan_where_lo_is_zero(memory: Any, rows: int, cols: int) -> None:
    groups, blocks = -(-rows // 8), -(-cols // 64)
    lo = memory.reshape(-1)[: blocks * 2 * groups * 512].reshape(blocks, 2, groups * 512)[:, 1]
    lo[~blocks_with_lo(memory, rows, cols).any(axis=1)] = np.nan


ROUNDED = {"float32": lambda x: x, "float16": lambda x: x.astype(np.float16), "bfloat16": lambda x: x.astype(BF16)}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("right", ROUNDED)
@pytest.mark.parametrize("left", ROUNDED)
def test_zero_lo_is_left_out(device: Engine, left: str, right: str, rng: np.random.Generator) -> None:
    """The same bits as with lo, and lo is not read. Rows of one block of columns, and of more than there are stages."""
    for m, n, k in ((9, 12, 60), (140, 180, 200), (3, 5, 700)):
        a, b = (ROUNDED[dtype](rng.standard_normal(s)).astype(F32) for dtype, s in ((left, (m, k)), (right, (n, k))))
        a[0, :] = -0.0
        result = product(device, a, b)
        for change in (everywhere, nan_where_lo_is_zero):
            assert (product(device, a, b, change=change).view(np.uint32) == result.view(np.uint32)).all()
        assert error(result, a, b) <= (3 * 2.0**-22 if "float32" in (left, right) else k * 2.0**-23)


def test_zero_lo_is_left_out_tile_by_tile(device: Engine, rng: np.random.Generator) -> None:
    """Numbers that were bfloat16 have a lo only beside one that is 2**31 times larger; special values have none."""
    a, b = (rng.standard_normal(s).astype(BF16).astype(F32) for s in ((150, 400), (340, 400)))
    b[339] = 0
    a[140, 330], b[339, 130], b[339, 200] = 1 + F32(2.0**-20), 2.0**40, 1 + 2.0**-7
    a[5, 0], a[6, 399], b[7, 1], b[8, 2], b[9, 3] = np.inf, np.nan, -np.inf, 1e-40, -1e-30
    a[10], b[10], b[11] = -0.0, 0.0, -0.0
    marks = [blocks_with_lo(device.host(split(device, device.array(x))), *x.shape).any(axis=1) for x in (a, b)]
    assert [np.flatnonzero(m).tolist() for m in marks] == [[330 // 64], [200 // 64]]
    result, whole = product(device, a, b), product(device, a, b, change=everywhere)
    assert (result.view(np.uint32) == whole.view(np.uint32))[~np.isnan(result)].all()
    assert (np.isnan(result) == np.isnan(whole)).all()
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64).T
    assert (np.isnan(result) == np.isnan(expected)).all()
    assert not np.signbit(result[10][result[10] == 0]).any(), "sums that are zero are +0"


def test_what_needs_repair_is_as_float32_and_disturbs_nothing(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((40, 150), (35, 150)))
    before = product(device, a, b)
    a[3, 7], a[11, 0], a[39, 149] = np.inf, np.nan, 1e-30
    b[0, 7], b[5, 3], b[34, 20] = 0, -np.inf, 1e-35
    after = product(device, a, b)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64).T
    good = np.ix_([i for i in range(40) if i not in (3, 11, 39)], [j for j in range(35) if j not in (0, 5, 34)])
    assert (before[good] == after[good]).all(), "rows that need no repair keep their bits"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(after[~finite], expected[~finite])
    size = np.abs(np.nan_to_num(a, posinf=0, neginf=0)) @ np.abs(np.nan_to_num(b, posinf=0, neginf=0)).T
    assert (np.abs(after[finite] - expected[finite]) <= 3 * 2.0**-22 * size[finite]).all()


def test_more_rows_need_repair_than_are_gathered_at_once(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((300, 70), (18, 70)))
    marked = np.flatnonzero(np.arange(300) % 5 < 2)
    a[marked, marked % 70] = np.inf
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(product(device, a, b)[marked], expected[marked])
    np.testing.assert_array_equal(product(device, b, a)[:, marked], expected[marked].T)


def test_small_elements_count_where_nothing_else_does(device: Engine, rng: np.random.Generator) -> None:
    """The large elements of a row meet zeros, or cancel: the product is that of elements which halves barely hold."""
    a, b = np.zeros((5, 140), F32), np.zeros((4, 140), F32)
    a[:, 3], a[:, 7] = 1e15, rng.standard_normal(5)
    b[0, 7], b[1, 7], b[1, 3], b[2, 5], b[3, 3], b[3, 4], b[3, 7] = 1.25, 3e-5, 1e-30, 1, 1, 1, 1
    a[:, 4] = -1e15
    a[4] = 0
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for result in (product(device, a, b), product(device, b, a).T):
        np.testing.assert_allclose(result[:, :3], expected[:, :3], rtol=3e-7)
        assert error(result, a, b) <= 3 * 2.0**-22


@pytest.mark.parametrize("spread", [10, 40, 120])
def test_rows_of_many_magnitudes(device: Engine, spread: int, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s) * 2.0 ** rng.integers(-spread, 1, s) for s in ((20, 150), (30, 150)))
    b[:, rng.random(150) < 0.7] = 0
    a, b = a.astype(F32), b.astype(F32)
    assert error(product(device, a, b), a, b) <= 3 * 2.0**-22


def test_a_repaired_element_does_not_depend_on_what_else_is_repaired(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((36, 140), (20, 140)))
    a[4, 0] = b[5, 0] = np.inf
    alone, whole = product(device, a[4:5], b), product(device, a, b)
    np.testing.assert_array_equal(whole[4], alone[0])
    a[:, 1] = np.nan
    a[4, 1] = 1
    np.testing.assert_array_equal(product(device, a, b)[4], product(device, a[4:5], b)[0])


@pytest.mark.parametrize("columns", [0, 3])
def test_the_ends_of_the_exponents(device: Engine, columns: int) -> None:
    """Scales are undone without overflow or underflow on the way, also below the normal numbers."""
    a, b = np.zeros((4, 66), F32), np.zeros((4, 66), F32)
    a[:, columns] = [2.0**127, 2.0**-126, 2.0**-70, -(2.0**64)]
    b[:, columns] = [2.0**-126, 2.0**127, 2.0**-75, 2.0**70]
    result = product(device, a, b)
    with np.errstate(all="ignore"):
        expected = np.outer(a[:, columns], b[:, columns])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("exponents", [(-64, -64), (-45, -70), (-100, 40), (70, -70), (0, 63), (50, 60)])
def test_scales_of_whole_tiles(device: Engine, exponents: tuple[int, int], rng: np.random.Generator) -> None:
    """One factor may undo those of a row and a column where it neither overflows nor is subnormal."""
    a, b = (rng.standard_normal((128, 64)).astype(F32) for _ in range(2))
    scaled = [np.ldexp(x, e) for x, e in zip((a, b), exponents, strict=True)]
    np.testing.assert_array_equal(product(device, *scaled), np.ldexp(product(device, a, b), sum(exponents)))


def test_strided_operands_are_repaired(device: Engine, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((6, 90), (7, 90)))
    a[2, 5], b[1, 6] = np.inf, 1e-33
    b[:, 5] = np.abs(b[:, 5])
    plain = product(device, a, b)
    transposed = product(device, a, b, (device.array(a, "fortran"), device.array(b, "row_gap")))
    np.testing.assert_array_equal(plain, transposed)
    assert np.isinf(plain[2]).all() and np.isfinite(plain[[0, 1, 3, 4, 5]]).all()


def test_widths_leave_few_processors_idle() -> None:
    for rows, cols in ((1024, 8192), (64, 8192), (4096, 4096), (256, 131072), (1, 1), (130, 50257)):
        width = tile_width(rows, cols, 132)
        assert width in TILE_WIDTHS and split_kernels.stages_for(width) >= 2
    assert tile_width(1024, 8192, 132) == 168 and tile_width(64, 8192, 132) == 64
