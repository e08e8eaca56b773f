"""The fingerprint of matrices, and kernels that run only where it changed; on the CPU by the shim, and on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine, assert_equal, lay_out, normal

import cupyfuse as cf
from cupyfuse import heads
from cupyfuse.cuda.fingerprint import CHANGED_AT, MOST_MATRICES, STATE_BYTES, Fingerprint, _sampled_runs
from cupyfuse.engines.cuda import CudaExecutable
from cupyfuse.plan.build import build
from cupyfuse.settings import Settings

DTYPES = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def runtime_of(device: Engine) -> Any:
    from cupyfuse.cuda.runtime import on_device

    return on_device(0) if device is CUDA else device.runtime


def shape_of(array: Any) -> tuple[int, int, int, int, int]:
    strides = [s // array.itemsize for s in array.strides]
    if array.ndim == 1:
        return 1, array.shape[0], 0, strides[0], array.itemsize
    return array.shape[0], array.shape[1], strides[0], strides[1], array.itemsize


class Watch:
    """A fingerprint of some matrices, with states for several streams."""

    def __init__(self, device: Engine, *matrices: Any):
        self.runtime = runtime_of(device)
        self.matrices, self.device = matrices, device
        self.check = Fingerprint(self.runtime, [shape_of(m) for m in matrices])
        self.memory = device.xp.empty(5 * STATE_BYTES // 4, np.uint32)
        self.memory[...] = 0

    def changed(self, token: int = 0, stream: int = 0) -> bool:
        at = self.runtime.address
        kept = at(self.memory)
        state = kept + STATE_BYTES * (stream + 1)
        self.check([at(m) for m in self.matrices], token, state, kept)
        words = self.device.host(self.memory).reshape(5, -1)
        assert not words[stream + 1, :2].any(), "the sum is reset"
        flag = int(words[stream + 1, CHANGED_AT // 4])
        assert flag in (0, 1)
        return bool(flag)


def values(rng: np.random.Generator, shape: Any, itemsize: int) -> Any:
    return rng.integers(0, 100, shape).astype(DTYPES[itemsize])


SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (17, 31), (64, 64), (5, 257), (301, 3), (2, 4099), (31, 1031), (131, 64)]
LAYOUTS = ["contiguous", "fortran", "row_gap", "column_gap", "reversed", "offset"]


@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_stays_is_unchanged_and_what_changes_is_seen(
    device: Engine, shape: tuple[int, int], itemsize: int, rng: np.random.Generator
) -> None:
    array = device.array(values(rng, shape, itemsize))
    watch = Watch(device, array)
    assert watch.changed() and not watch.changed() and not watch.changed()
    for _ in range(4):
        row, col = (int(rng.integers(n)) for n in shape)
        array[row, col] += 1
        assert watch.changed() and not watch.changed()
    array[...] = array + 1
    assert watch.changed() and not watch.changed()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_every_layout(device: Engine, layout: str, itemsize: int, rng: np.random.Generator) -> None:
    array = lay_out(device.xp, values(rng, (19, 45), itemsize), layout)
    watch = Watch(device, array)
    assert watch.changed() and not watch.changed()
    for row, col in ((0, 0), (18, 44), (7, 13), (18, 0)):
        array[row, col] += 1
        assert watch.changed() and not watch.changed()


@pytest.mark.parametrize("cols", [44, 45, 47])
def test_what_lies_between_rows_does_not_count(device: Engine, cols: int) -> None:
    whole = device.array(np.ones((19, 48), np.float32))
    watch = Watch(device, whole[:, :cols])
    assert watch.changed()
    whole[:, cols:] = 2
    assert not watch.changed()
    whole[:, cols - 1] = 2
    assert watch.changed()


def test_each_element_of_a_small_matrix_counts(device: Engine) -> None:
    array = device.array(np.zeros((3, 21), np.float16))
    watch = Watch(device, array)
    watch.changed()
    for row, col in itertools.product(range(3), range(21)):
        array[row, col] = 1
        assert watch.changed(), (row, col)
    array[...] = array[:, ::-1]
    assert not watch.changed(), "the same bits in the same places"
    array[0, 0] = 2
    assert watch.changed()
    array[0] = device.array(np.arange(21, dtype=np.float16))
    assert watch.changed()
    for other in ([*range(8, 16), *range(8), *range(16, 21)], [*range(8, 16), 1, 0, *range(2, 8), *range(16, 21)]):
        array[0] = device.array(np.array(other, np.float16))
        assert watch.changed(), "elements, and 16 bytes of them, have changed their places"


def test_any_bit_counts(device: Engine) -> None:
    array = device.array(np.zeros(5, np.float32))
    watch = Watch(device, array)
    watch.changed()
    array[:] = device.array(np.array([0, 0, 0, -0.0, 0], np.float32))  # a fill with -0.0 may lose its sign
    assert watch.changed()
    array[3] = np.nan
    assert watch.changed() and not watch.changed(), "a NaN is itself"


def test_long_rows_are_sampled(device: Engine, rng: np.random.Generator) -> None:
    """Of rows longer than what is read of each, some elements: of every row, and of every column of enough rows."""
    rows, cols = 1500, 160
    assert _sampled_runs(rows, cols, 8) == 8 < cols * 8 // 32
    array = device.array(rng.standard_normal((rows, cols)))
    watch = Watch(device, array)
    watch.changed()
    for row in (0, 1, 700, rows - 1):
        array[row] *= 1.5
        assert watch.changed() and not watch.changed()
    for col in (0, 1, 79, 80, cols - 1):
        array[:, col] += 1
        assert watch.changed() and not watch.changed()


def test_long_arrays_are_sampled_densely(device: Engine) -> None:
    assert _sampled_runs(1, 65536, 4) * 8 == 65536
    assert _sampled_runs(1, 1 << 20, 4) == 8192 and _sampled_runs(1000, 65, 4) == 9
    assert _sampled_runs(8192, 8192, 4) == 8
    assert _sampled_runs(3, 0, 4) == 0


@pytest.mark.parametrize("shapes", [[(0, 5)], [(5, 0)], [(0,)], [(0, 5), (3, 4)]], ids=str)
def test_without_elements(device: Engine, shapes: Sequence[Any]) -> None:
    watch = Watch(device, *(device.array(np.ones(shape, np.float32)) for shape in shapes))
    assert watch.changed() and not watch.changed() and watch.changed(token=1)


def test_a_token_counts(device: Engine) -> None:
    watch = Watch(device, device.array(np.ones((3, 5), np.float32)))
    assert watch.changed(0) and not watch.changed(0) and watch.changed(1) and not watch.changed(1)
    assert watch.changed(0) and watch.changed(2**63 + 5) and not watch.changed(2**63 + 5)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, MOST_MATRICES])
def test_several_matrices(device: Engine, count: int, rng: np.random.Generator) -> None:
    shapes = [(5, 7), (9,), (2, 300), (1, 1), (64, 3), (33,), (3, 3), (40, 40)]
    arrays = [device.array(normal(rng, shapes[k % 8])) for k in range(count)]
    watch = Watch(device, *arrays)
    assert watch.changed() and not watch.changed()
    for array in arrays:
        array[-1] *= 2
        assert watch.changed() and not watch.changed()
    if count > 8:
        arrays[0][...], arrays[8][...] = arrays[8].copy(), arrays[0].copy()
        assert watch.changed(), "matrices have changed places"


def test_repeated_rows_and_columns(device: Engine) -> None:
    column = device.array(np.arange(5, dtype=np.float32))
    watch = Watch(device, np.broadcast_to(column, (3, 5)) if device is HOST else device.xp.broadcast_to(column, (3, 5)))
    assert watch.changed() and not watch.changed()
    column[4] = 0
    assert watch.changed() and not watch.changed()


def test_streams_check_for_themselves(device: Engine) -> None:
    """What another stream has prepared may not be there yet; and what it has overwritten is to be prepared again."""
    array = device.array(np.ones((3, 50), np.float32))
    watch = Watch(device, array)
    assert watch.changed(stream=0) and watch.changed(stream=1)
    assert not watch.changed(stream=0) and not watch.changed(stream=1)
    array[1] = 2
    assert watch.changed(stream=1) and not watch.changed(stream=1)
    array[1] = 1  # as stream 0 has seen it last
    assert watch.changed(stream=0) and not watch.changed(stream=0)
    assert watch.changed(stream=1) and not watch.changed(stream=0)
    array[1] = 2
    assert watch.changed(stream=0)
    array[1] = 1
    assert watch.changed(stream=0)
    assert watch.changed(stream=1), "the values it knows, which stream 0 may be writing once more"


# Conditional kernels ------------------------------------------------------------------------------------------------


def folded(x: Any, w: Any, b: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return cf.softmax(cf.batch_norm(cf.linear(x, w, b), mean, var, gamma, beta), axis=1)


def plans(device: Engine) -> Iterator[tuple[str, Any, list[Any]]]:
    rng = np.random.default_rng(0)
    for name, function, shapes in (
        ("head_sum", heads.head_sum, [(6, 40), (700, 40), (700,)]),
        ("softmax of weights", lambda x, w: x @ cf.softmax(w, axis=1).T, [(6, 40), (30, 40)]),
        ("folded", folded, [(6, 40), (30, 40), *[(30,)] * 5]),
        ("long rows", lambda x, w: x + cf.softmax(w, axis=1).sum(axis=0), [(3, 1300), (5, 1300)]),
        ("very long rows", lambda x, w: x + cf.logsumexp(w, axis=1), [(3, 2), (2, 40000)]),
    ):
        arrays = [np.abs(normal(rng, shape)) + np.float32(0.5) for shape in shapes]
        traced = cf.fuse(function).trace([cf.spec(a.shape, "float32") for a in arrays])
        plan = build(traced, None, Settings(), frozenset(range(1, len(arrays)))).prepare
        assert plan is not None, name
        yield name, plan, [device.array(arrays[n.argument]) for n in plan.graph.inputs]


def test_conditional_plans(device: Engine) -> None:
    """Where the flag is 0 nothing is written; where it is not, what the plan computes."""
    runtime = runtime_of(device)
    templates = set()
    for name, plan, arrays in plans(device):
        assert plan.conditional, name
        expected = CudaExecutable(plan, arrays, runtime).load()(arrays, [None] * len(plan.outputs))
        execute = CudaExecutable(plan, arrays, runtime, conditional=True).load()
        results = execute.allocate()
        flag = device.array(np.zeros(1, np.uint32))
        for result in results:
            result[...] = -7
        addresses = [[runtime.address(a) for a in each] for each in (arrays, results)]
        execute.run_if_changed(*addresses, runtime.address(flag), runtime.stream())
        assert all((device.host(r) == -7).all() for r in results), name
        flag[0] = 1
        execute.run_if_changed(*addresses, runtime.address(flag), runtime.stream())
        for result, want in zip(results, expected, strict=True):
            assert_equal(device.host(result), device.host(want))
        templates |= {step.kind for step in plan.steps}
    assert templates >= {"ColumnStats", "RowProgram"}


@pytest.mark.parametrize("shape", [(37, 130), (150, 130), (130, 1300)], ids=str)
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_conditional_splits(device: Engine, by: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    """On a multiprocessor, which has room for fewer rows than the larger matrices have."""
    from cupyfuse.cuda.launch import sequence
    from cupyfuse.cuda.split_launch import Split
    from cupyfuse.ir.products import split_shape

    runtime = runtime_of(device)
    x = device.array(normal(rng, shape), "contiguous" if by == "rows" else "fortran")
    strides = x.strides[0] // 4, x.strides[1] // 4
    split = sequence([Split(*shape, strides, conditional=True).launch(runtime, 0, 1, 2)])
    plainly = sequence([Split(*shape, strides).launch(runtime, 0, 1)])
    memory, other = (device.xp.empty(split_shape(x.shape), np.float16) for _ in range(2))
    memory[...], other[...] = -7, -7
    flag = device.array(np.zeros(1, np.uint32))
    at = runtime.address
    split([at(x), at(memory), at(flag)], runtime.stream())
    assert (device.host(memory) == -7).all()
    flag[0] = 1
    split([at(x), at(memory), at(flag)], runtime.stream())
    plainly([at(x), at(other)], runtime.stream())
    np.testing.assert_array_equal(device.host(memory).view(np.uint16), device.host(other).view(np.uint16))


def test_plans_with_products_of_cublas_are_not_conditional() -> None:
    function = cf.fuse(lambda x, a, b: cf.softmax(x + a @ b, axis=1))
    traced = function.trace([cf.spec((4, 8)), cf.spec((4, 5)), cf.spec((5, 8))])
    plan = build(traced, None, Settings(), frozenset((1, 2))).prepare
    assert plan is not None and not plan.conditional
