"""Plans on PyTorch's tensors: by NumPy, by the kernels on the CPU, and on a GPU in PyTorch's memory and streams."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_close, assert_equal, dtype_of, info, normal, unit
from torch_support import OnHost, captured, require_gpu

import cupyfuse as cf
from cupyfuse import dtypes, settings
from cupyfuse.api import arrays
from cupyfuse.errors import EngineError
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.settings import DEFAULT_WORKSPACE, Settings
from cupyfuse.torch.chains.runtime import device_of, load, runtime_of
from cupyfuse.torch.chains.tensors import (
    TensorMemory,
    as_matrix,
    dtype_name,
    folds,
    from_numpy,
    layout_of,
    to_numpy,
)

Tensor = torch.Tensor
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Place:
    """Where the tensors of a test are, and what runs plans there."""

    def __init__(self, name: str):
        self.name = name
        self.device = "cuda" if name == "cuda" else "cpu"

    def tensor(self, values: Any, layout: str = "contiguous") -> Tensor:
        return laid_out(from_numpy(np.array(values)).to(self.device), layout)

    def tensors(self, *values: Any) -> list[Tensor]:
        return [self.tensor(v) for v in values]

    def plan(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        precision: str = "highest",
        max_workspace: int = DEFAULT_WORKSPACE,
        bound: frozenset[int] = frozenset(),
    ) -> Plan:
        traced = cf.fuse(function).trace([cf.spec(tuple(t.shape), dtype_name(t.dtype)) for t in tensors])
        chosen = Settings(precision, device_of(tensors[0]), max_workspace, epilogues=settings.current_epilogues())
        return build(traced, dict(enumerate(map(layout_of, tensors))), chosen, bound)

    def load(self, plan: Plan, tensors: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        if self.name == "host":
            return OnHost().load(plan, tensors)
        return load(plan, tensors)

    def run(self, function: Callable[..., Any], tensors: Sequence[Tensor], outs: Any = None, **choices: Any) -> Any:
        """One call, with plans made for it."""
        with torch.no_grad():
            plan = self.plan(function, tensors, **choices)
            return self.load(plan, tensors)(tensors, outs or [None] * len(plan.outputs))


LAYOUTS = ("contiguous", "transposed", "row_gap", "column_gap", "offset", "expanded")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """An equal tensor (`expanded`: with equal rows), lying in memory as `layout` says."""
    shape = tensor.shape
    if layout == "contiguous" or tensor.dim() < (2 if layout in ("transposed", "row_gap", "expanded") else 1):
        return tensor.clone()
    if layout == "expanded":
        return tensor[:1].clone().expand(shape)
    if layout == "transposed":
        target = torch.empty(shape[::-1], dtype=tensor.dtype, device=tensor.device).t()
    elif layout == "row_gap":
        target = torch.empty((shape[0], shape[1] + 3), dtype=tensor.dtype, device=tensor.device)[:, : shape[1]]
    elif layout == "column_gap":
        target = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=tensor.dtype, device=tensor.device)[..., ::2]
    else:
        target = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(shape)
    return target.copy_(tensor)


@pytest.fixture(params=["cpu", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "cuda":
        require_gpu()
    return Place(request.param)


@pytest.fixture
def gpu() -> Place:
    require_gpu()
    return Place("cuda")


def wide(tensors: Sequence[Tensor]) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(t.cpu()).astype(np.float64) for t in tensors]


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def check(got: Sequence[Tensor], expected: Any, roundings: float = 16.0) -> None:
    """Within some roundings of the largest value; special values in the same places."""
    expected = listed(expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        e = np.asarray(e, np.float64)
        finite = np.abs(e[np.isfinite(e)])
        bound = roundings * unit(str(dtype_name(g.dtype))) * max(1.0, finite.max(initial=0.0))
        assert not g.requires_grad
        assert_close(to_numpy(g.cpu()).astype(np.float64), e, bound)


def check_function(
    place: Place, function: Callable[..., Any], tensors: Sequence[Tensor], roundings: float = 16.0, **choices: Any
) -> list[Tensor]:
    got: list[Tensor] = place.run(function, tensors, **choices)
    with np.errstate(all="ignore"):
        check(got, function(*wide(tensors)), roundings)
    assert all(g.device == tensors[0].device for g in got)
    return got


# What runs ----------------------------------------------------------------------------------------------------------


def pointwise(x: Any, v: Any) -> Any:
    return cf.gelu(x * v + 0.5) - np.exp(-np.abs(x))


def tail(x: Any, v: Any) -> Any:
    return cf.softmax(x * v, axis=1), cf.logsumexp(x + v, axis=1, keepdims=True), (x - v).max(axis=1)


def columns(x: Any) -> Any:
    return x.sum(axis=0), x.mean(axis=0), x.max(axis=0), cf.logsumexp(x, axis=0), x.min()


def head(x: Any, w: Any, b: Any) -> Any:
    return cf.logsumexp(cf.linear(x, w, b), axis=1, keepdims=True)


def dense(x: Any, w: Any, b: Any) -> Any:
    return cf.gelu(cf.linear(x, w, b))


@pytest.mark.parametrize("name", dtypes.ITEMSIZE)
def test_tensors_hold_whatever_plans_store(name: str) -> None:
    """Narrow integers too, such as labels that blocks of rows compare, which no argument of a chain has."""
    dtype = TensorMemory(torch.device("cpu")).dtype(name)
    assert str(dtype) == f"torch.{name}" and dtype.itemsize == dtypes.ITEMSIZE[name]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [pointwise, tail], ids=["pointwise", "tail"])
def test_every_dtype(place: Place, function: Callable[..., Any], dtype: str, rng: np.random.Generator) -> None:
    tensors = place.tensors(normal(rng, (33, 100), dtype), normal(rng, 100, dtype))
    for got in check_function(place, function, tensors):
        assert got.dtype == tensors[0].dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [pointwise, tail], ids=["pointwise", "tail"])
def test_every_layout(place: Place, function: Callable[..., Any], layout: str, rng: np.random.Generator) -> None:
    tensors = [place.tensor(normal(rng, s), layout) for s in ((12, 66), (66,))]
    check_function(place, function, tensors)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 1), (3, 1023), (5, 1024)])
def test_odd_shapes(place: Place, shape: tuple[int, int], rng: np.random.Generator) -> None:
    check_function(place, tail, place.tensors(normal(rng, shape), normal(rng, shape[1])))
    check_function(place, lambda x: x * 2, place.tensors(normal(rng, shape[::-1])))


def test_reductions_down_the_columns(place: Place, rng: np.random.Generator) -> None:
    check_function(place, columns, place.tensors(normal(rng, (300, 37)) + 3), roundings=64)


def test_special_values(place: Place, rng: np.random.Generator) -> None:
    x = normal(rng, (9, 100))
    x[3, 5], x[4, 5], x[5] = np.inf, np.nan, -np.inf
    check_function(place, tail, place.tensors(x, np.abs(normal(rng, 100)) + 0.5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [head, dense], ids=["head", "dense"])
def test_products(place: Place, function: Callable[..., Any], dtype: str, rng: np.random.Generator) -> None:
    tensors = place.tensors(*(normal(rng, s, dtype) for s in ((37, 53), (29, 53), (29,))))
    check_function(place, function, tensors, roundings=64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_every_layout(place: Place, layout: str, rng: np.random.Generator) -> None:
    for dtype in ("float32", "float64") if layout == "transposed" else ("float32",):
        x, w, b = (normal(rng, s, dtype) for s in ((20, 34), (18, 34), (18,)))
        check_function(place, dense, [place.tensor(x, layout), place.tensor(w, layout), place.tensor(b)], 64)


@pytest.mark.parametrize("shape", [(0, 4, 3), (5, 0, 3), (5, 4, 0)])
def test_products_of_nothing(place: Place, shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, k, n = shape
    check_function(place, dense, place.tensors(*(normal(rng, s) for s in ((m, k), (n, k), (n,)))))
    check_function(place, lambda x, y: x @ y, place.tensors(normal(rng, (m, k)), normal(rng, (k, n))))


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_on_other_axes(place: Place, dtype: str, rng: np.random.Generator) -> None:
    def transposed(x: Any, w: Any) -> Any:
        return np.exp(x).T, (x @ w).T * 2, x.sum(axis=1), x.sum(axis=1)[:, None].T, x[:, None] + 1, x.sum()

    got = check_function(place, transposed, place.tensors(normal(rng, (6, 20), dtype), normal(rng, (20, 8), dtype)), 64)
    assert [tuple(g.shape) for g in got] == [(20, 6), (8, 6), (6,), (1, 6), (6, 1, 20), ()]


def test_bools_and_integers(place: Place, rng: np.random.Generator) -> None:
    def chosen(x: Any, mask: Any, count: Any) -> Any:
        return np.where(mask, x, -x) * count, x > 0

    x, mask = normal(rng, (8, 33)), rng.random((8, 33)) < 0.5
    tensors = place.tensors(x, mask, np.asarray(3))
    got = place.run(chosen, tensors)
    check(got[:1], np.where(mask, x, -x) * np.float64(3))
    assert got[1].dtype is torch.bool and (got[1].cpu().numpy() == (x > 0)).all()


def test_tensors_that_require_gradients(place: Place, rng: np.random.Generator) -> None:
    tensors = [t.requires_grad_() for t in place.tensors(normal(rng, (8, 33)), normal(rng, 33))]
    got = check_function_detached(place, tail, tensors)
    parameters = [torch.nn.Parameter(t.detach()) for t in tensors]
    for one, other in zip(got, place.run(tail, parameters), strict=True):
        assert torch.equal(one, other)


def check_function_detached(place: Place, function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    got: list[Tensor] = place.run(function, tensors)
    check(got, function(*wide([t.detach() for t in tensors])))
    return got


def test_prepared_values_follow_the_arguments(place: Place, rng: np.random.Generator) -> None:
    def summed(x: Any, w: Any, b: Any) -> Any:
        return cf.linear(x, w, b).sum(axis=1, keepdims=True)

    tensors = place.tensors(normal(rng, (10, 30)), normal(rng, (20, 30)), normal(rng, 20))
    plan = place.plan(summed, tensors, bound=frozenset((1, 2)))
    assert plan.prepare is not None
    needed = [tensors[n.argument] for n in plan.prepare.graph.inputs]
    prepared = place.load(plan.prepare, needed)(needed, [None] * len(plan.prepare.outputs))
    got = place.load(plan, [*tensors, *prepared])([*tensors, *prepared], [None])
    check(got, summed(*wide(tensors)), roundings=64)


@pytest.mark.parametrize("rows", [640, 700])
def test_blocks_of_rows(place: Place, rows: int, rng: np.random.Generator) -> None:
    def soft(x: Any, w: Any) -> Any:
        return cf.softmax(x @ w.T, axis=1), (x @ w.T).max(axis=1)

    tensors = place.tensors(normal(rng, (rows, 24)), normal(rng, (56, 24)))
    plan = place.plan(soft, tensors, max_workspace=256 * 56 * 4)
    assert plan.blocks is not None and plan.blocks.count > 2
    execute = place.load(plan, tensors)
    check(execute(tensors, [None, None]), soft(*wide(tensors)), roundings=64)
    outs = [torch.full_like(place.tensor(np.zeros((rows, 56), np.float32)), np.nan), None]
    results = execute(tensors, outs)
    assert results[0] is outs[0]
    check(results, soft(*wide(tensors)), roundings=64)


# What is written to -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "row_gap", "column_gap", "offset"])
def test_results_go_where_they_are_asked(place: Place, layout: str, rng: np.random.Generator) -> None:
    tensors = place.tensors(normal(rng, (12, 66)), normal(rng, 66))
    expected = place.run(tail, tensors)
    outs = [laid_out(torch.full_like(e, np.nan), layout) for e in expected]
    versions = [o._version for o in outs]
    returned = place.run(tail, tensors, [*outs[:2], None])
    assert returned[0] is outs[0] and returned[1] is outs[1] and returned[2] is not outs[2]
    check(returned, tail(*wide(tensors)))
    assert [o._version > v for o, v in zip(outs, versions, strict=True)] == [True, True, False]
    assert outs[2].isnan().all()


def norm(x: Any, mean: Any, var: Any, count: Any) -> Any:
    return cf.relu(cf.batch_norm(x, mean, var, training=True, num_batches_tracked=count))


@pytest.mark.parametrize("layout", ["contiguous", "column_gap", "offset"])
def test_arguments_change_in_place(place: Place, layout: str, rng: np.random.Generator) -> None:
    x = normal(rng, (64, 30)) + 1
    mean, var, count = np.zeros(30, np.float32), np.ones(30, np.float32), np.asarray(3)
    tensors = [place.tensor(x), place.tensor(mean, layout), place.tensor(var, layout), place.tensor(count)]
    versions = [t._version for t in tensors]
    host = [v.astype(np.float64) for v in (x, mean, var)]
    expected = norm(*host, count)
    check(place.run(norm, tensors), expected, roundings=64)
    check(tensors[1:3], host[1:], roundings=64)
    assert int(tensors[3]) == int(count)
    assert [t._version - v for t, v in zip(tensors, versions, strict=True)] == [0, 1, 1, 1]


def test_a_change_is_seen_by_autograd(place: Place, rng: np.random.Generator) -> None:
    x, mean, var, count = place.tensors(normal(rng, (9, 4)), np.zeros(4, "f"), np.ones(4, "f"), np.asarray(0))
    weight = torch.ones(4, device=x.device, requires_grad=True)
    product = mean * weight  # whose gradient needs the old mean
    place.run(norm, (x, mean, var, count))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors_have_no_versions(place: Place, rng: np.random.Generator) -> None:
    with torch.inference_mode():
        tensors = place.tensors(normal(rng, (9, 4)), np.zeros(4, "f"), np.ones(4, "f"), np.asarray(0))
        (got,) = place.run(norm, tensors)
        assert int(tensors[3]) == 1 and got.is_inference()
        place.run(norm, tensors, [got])


def test_results_have_memory_of_their_own(place: Place, rng: np.random.Generator) -> None:
    tensors = place.tensors(normal(rng, (9, 4)))
    got = place.run(lambda x: (x, x.T, x + 0), tensors)
    addresses = {t.data_ptr() for t in (*tensors, *got)}
    assert len(addresses) == 4
    again = place.run(lambda x: (x, x.T, x + 0), tensors)
    assert not addresses & {t.data_ptr() for t in again}


# The door -----------------------------------------------------------------------------------------------------------


def test_dtypes_have_names() -> None:
    assert [dtype_name(getattr(torch, name)) for name in dtypes.NAMES] == list(dtypes.NAMES)
    assert dtype_name(torch.complex64) is None and dtype_name(torch.int32) is None


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 5), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_those_of_equal_arrays(shape: tuple[int, ...], layout: str) -> None:
    tensor = laid_out(torch.zeros(shape), layout)
    assert layout_of(tensor) == arrays.layout(tensor.numpy())


def test_the_cpu_is_no_device() -> None:
    assert device_of(torch.zeros(3)) is None


def test_bfloat16_comes_and_goes_without_a_copy() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    array = to_numpy(tensor)
    assert array.dtype == dtype_of("bfloat16") and array.ctypes.data == tensor.data_ptr()
    back = from_numpy(array)
    assert back.data_ptr() == tensor.data_ptr() and back.stride() == tensor.stride() and torch.equal(back, tensor)


def test_bfloat16_on_the_cpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        Place("cpu").run(lambda x: x + 1, [torch.zeros(3, 4, dtype=torch.bfloat16)])


# On a GPU -----------------------------------------------------------------------------------------------------------


def standard(*shapes: Any, dtype: Any = torch.float32) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    return [torch.randn(s, generator=generator, device="cuda", dtype=torch.float32).to(dtype) for s in shapes]


@pytest.mark.gpu
def test_the_gpu_is_known(gpu: Place) -> None:
    device = device_of(torch.zeros(3, device="cuda"))
    assert device is None or device.name in torch.cuda.get_device_name()
    assert runtime_of(0).processors == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.gpu
@pytest.mark.parametrize("function", [tail, head, dense], ids=["tail", "head", "dense"])
def test_the_current_stream_is_used(gpu: Place, function: Callable[..., Any]) -> None:
    tensors = standard((1000, 2048), (1024, 2048), (1024,)) if function is not tail else standard((1000, 4096), 4096)
    plan = gpu.plan(function, tensors)
    execute, none = gpu.load(plan, tensors), [None] * len(plan.outputs)
    expected = execute(tensors, none)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Unordered with this stream's earlier work, the call would read what the copy has not written yet.
        late = torch.zeros_like(tensors[0])
        torch.cuda._sleep(20_000_000)
        late.copy_(tensors[0])
        got = execute([late, *tensors[1:]], none)
    stream.synchronize()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_cupy_is_left_alone(gpu: Place) -> None:
    import cupy

    own = cupy.cuda.Stream(non_blocking=True)
    before = cupy.get_default_memory_pool().total_bytes()
    tensors = standard((300, 200), (100, 200), (100,))
    with own:
        gpu.run(dense, tensors)
        assert cupy.cuda.get_current_stream() == own
    assert cupy.get_default_memory_pool().total_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("function", [tail, head, dense], ids=["tail", "head", "dense"])
def test_a_call_allocates_its_results_and_one_workspace(gpu: Place, function: Callable[..., Any]) -> None:
    tensors = standard((256, 512), (1024, 512), (1024,)) if function is not tail else standard((300, 512), 512)
    plan = gpu.plan(function, tensors)
    execute, none = gpu.load(plan, tensors), [None] * len(plan.outputs)
    execute(tensors, none)

    def count() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    execute(tensors, none)
    before = count()
    execute(tensors, none)
    assert count() - before == len(plan.outputs) + (plan.workspace > 0)


@pytest.mark.gpu
def test_threads_and_streams_share_an_executable(gpu: Place) -> None:
    tensors = standard((500, 300), (700, 300), (700,))
    plan = gpu.plan(head, tensors)
    execute = gpu.load(plan, tensors)
    (expected,) = execute(tensors, [None])
    torch.cuda.synchronize()
    same: list[bool] = []

    def work(on_a_stream: bool) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream() if on_a_stream else None):
            results = [execute(tensors, [None])[0] for _ in range(50)]
            same.append(all(torch.equal(r, expected) for r in results))

    threads = [threading.Thread(target=work, args=(k % 2 > 0,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 4


@pytest.mark.gpu
def test_a_new_thread_needs_no_preparation(gpu: Place) -> None:
    """It has no CUDA context of its own yet, and memory from the allocator's cache gives it none."""
    tensors = standard((64, 300), 300)
    execute = gpu.load(gpu.plan(tail, tensors), tensors)
    expected = execute(tensors, [None] * 3)
    del expected[1:]
    torch.cuda.synchronize()
    got: list[Tensor] = []
    thread = threading.Thread(target=lambda: got.extend(execute(tensors, [None] * 3)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["tail", "head", "dense", "transposed", "blocks"])
def test_calls_are_captured_and_replayed(gpu: Place, name: str, dtype: str) -> None:
    function = {"tail": tail, "transposed": lambda x, w, b: np.exp(x @ w.T + b).T}.get(
        name, dense if name == "dense" else head
    )
    shapes = ((600, 256), (256,)) if name == "tail" else ((600, 256), (384, 256), (384,))
    tensors = standard(*shapes, dtype=getattr(torch, dtype))
    tensors = [t / 16 for t in tensors]
    if name == "transposed":
        tensors[0] = laid_out(tensors[0], "column_gap")  # which a step of the plan copies
    with settings.epilogues("never" if name == "blocks" else "measured"):  # an epilogue leaves no product to cut
        plan = gpu.plan(function, tensors, max_workspace=200 << 10 if name == "blocks" else DEFAULT_WORKSPACE)
    assert (plan.blocks is not None) == (name == "blocks")
    execute, none = gpu.load(plan, tensors), [None] * len(plan.outputs)
    graph, results = captured(lambda: execute(tensors, none))
    for _ in range(3):
        tensors[0].copy_(torch.randn_like(tensors[0]) / 16)
        # Fill memory that the allocator holds free with NaN: a replay must not read it.
        taken = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(results, execute(tensors, none), strict=True):
            assert torch.equal(got, want)
        del taken


@pytest.mark.gpu
def test_a_first_call_within_a_capture_says_what_to_do(gpu: Place) -> None:
    tensors = standard((5, 7))
    torch.cuda.synchronize()
    with pytest.raises(EngineError, match="before the capture begins"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gpu.run(lambda x: cf.softmax(x * 0.2468013579, axis=1), tensors)
    gpu.run(lambda x: cf.softmax(x * 0.2468013579, axis=1), tensors)


@pytest.mark.gpu
def test_another_current_device_is_left_as_it_is(gpu: Place) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU: two of them")
    for function, shapes in ((tail, ((33, 100), 100)), (dense, ((33, 100), (50, 100), 50))):
        here = standard(*shapes)
        there = [t.to("cuda:1") for t in here]
        plan = gpu.plan(function, there)
        execute = gpu.load(plan, there)
        got = execute(there, [None] * len(plan.outputs))
        assert torch.cuda.current_device() == 0
        assert all(g.device == torch.device("cuda", 1) for g in got)
        for one, other in zip(got, gpu.run(function, here), strict=True):
            assert torch.equal(one.cpu(), other.cpu())
        with torch.cuda.device(1):
            execute(there, [None] * len(plan.outputs))
            assert torch.cuda.current_device() == 1


@pytest.fixture
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True], indirect=True)
@pytest.mark.parametrize("precision", ["highest", "ieee", "high", "tf32", "medium"])
@pytest.mark.parametrize("shape", [(64, 512, 96), (512, 1024, 768)])
def test_precisions_are_the_plans_own(gpu: Place, precision: str, shape: tuple[int, int, int], tf32: bool) -> None:
    """Whatever PyTorch allows its own products; and its own products stay as they were."""
    m, k, n = shape
    x, w = standard((m, k), (n, k))
    own = x @ w.T
    (got,) = gpu.run(lambda x, w: x @ w.T, (x, w), precision=precision)
    a, b = wide((x, w))
    error = np.abs(got.cpu().numpy() - a @ b.T) / (np.abs(a) @ np.abs(b).T)
    # Unit roundoffs of both operands: 24, 11 (TF32) and 8 (bfloat16) bits; float32 accumulates over k products.
    bound = {"highest": k * 2.0**-24, "ieee": k * 2.0**-24, "medium": 2 * 2.0**-8}.get(precision, 2 * 2.0**-11)
    assert error.max() <= bound
    if precision in ("highest", "ieee"):
        assert error.max() < 2.0**-17, "TF32 would leave errors of 2**-13 or so"
    assert torch.equal(own, x @ w.T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_16_bits_add_up_in_float32(gpu: Place, dtype: str) -> None:
    for rows, inner in ((13, 1023), (13, 4096), (64, 8192)):
        (x,) = standard((rows, inner), dtype=getattr(torch, dtype))
        (got,) = gpu.run(lambda x: x @ x.T, [x])
        (a,) = wide([x])
        expected, size = a @ a.T, np.abs(a) @ np.abs(a).T
        limit = (inner + 2) * 2.0**-24 * size + unit(dtype) * np.abs(expected)
        assert (np.abs(wide([got])[0] - expected) <= limit).all()


@pytest.mark.gpu
def test_the_same_bits_as_through_cupy(gpu: Place) -> None:
    import cupy

    tensors = standard((300, 500), (700, 500), (700,))
    through_cupy = cf.fuse(tail)(*map(cupy.asarray, (tensors[0], tensors[1][0])))
    for got, want in zip(gpu.run(tail, [tensors[0], tensors[1][0]]), through_cupy, strict=True):
        assert_equal(got.cpu().numpy(), want.get())


def test_widths_of_types_are_known() -> None:
    assert all(torch.finfo(getattr(torch, name)).bits == info(name).bits for name in FLOATS)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 4).permute(1, 0, 2),
        torch.zeros(2, 4, 3).permute(0, 2, 1),  # its last dimension may have any stride
        torch.zeros(2, 3, 5, 4)[:, :, :3],
        torch.zeros(2, 3, 5, 4)[:, :, 1],
        torch.zeros(1, 6, 4).permute(1, 0, 2),
        torch.zeros(3, 1).expand(2, 3, 4),
        torch.zeros(3, 4).expand(2, 3, 4),
        torch.zeros(2, 0, 4).permute(1, 0, 2),
        torch.zeros(2, 3, 0).permute(1, 0, 2),
        torch.zeros(4, 3).t(),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.stride()}",
)
def test_what_folds_is_not_copied(tensor):
    assert folds(tensor) == (as_matrix(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr())
