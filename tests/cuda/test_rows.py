"""Rows that begin between two vectors, are held as they were loaded, or are shared by the blocks of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forced_rows import check_in_orders, force, program_of, results_of
from kernel_cases import Case, affine_softmax, layer_norm, normalised, places, reductions, softmax
from support import HOST, assert_equal, dtype_of, normal

import cupyfuse as cf
from cupyfuse.cuda.config import Access, Config, accesses
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.program import Program
from cupyfuse.cuda.sources import emit_kernels
from cupyfuse.engines import kernel_launch
from cupyfuse.errors import ClusterError
from cupyfuse.plan.schedule import state_size

# One block or several for a row, in registers or read again; a thread has one pack, or several.
CONFIGURATIONS = [
    Config("row_lanes", 64, 3, 4, 32),
    Config("row_lanes", 64, 3, 4, 16, rows=3),  # twelve rows a block: some lanes of a warp, and warps, have none
    Config("row_block", 64, 2, 8),
    Config("row_block", 32, 4, 4),
    Config("row_stream", 64, 2, 4),
    Config("row_stream", 128, 1, 4, rows=4),  # a warp for each row
    Config("row_shared", 32, 1, 4, packs=1),
    Config("row_shared", 32, 2, 2, cluster=2, packs=2),
    Config("row_shared", 32, 1, 2, cluster=12, packs=1),
    Config("row_shared", 64, 1, 8, cluster=4, packs=1),
    Config("row_shared", 96, 2, 8, packs=2, rows=3, columns=True),
    Config("row_shared", 128, 1, 4, cluster=3, packs=1, rows=2, columns=True),
]


PACKED = [
    Config("row_lanes", 64, 3, 4, 16, packed=True, rows=2),  # eight rows a block, of which the last has fewer
    *(replace(c, packed=True) for c in CONFIGURATIONS if c.template in ("row_lanes", "row_block")),
]


def name_of(config: Config) -> str:
    held = "-packed" * config.packed + f"-{config.rows}rows" * (config.rows > 1)
    return f"{config.template}-{config.threads}x{config.vec}-{config.cluster}{held}" + "-columns" * config.columns


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS + PACKED, ids=name_of)
@pytest.mark.parametrize("shape", [(5, 256), (5, 251)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("program", [softmax, layer_norm, reductions, affine_softmax, places])
def test_every_way_to_hold_a_row(
    monkeypatch: pytest.MonkeyPatch, config: Config, shape: tuple[int, int], program: Any
) -> None:
    """In every order of the threads, and with special values."""
    force(monkeypatch, config, shape[1])
    dtype = "float16" if config.vec == 8 else "float32"
    for special in (False, True):
        check_in_orders(Case(program, shape, dtype, special=special))


@pytest.mark.rotates
@pytest.mark.parametrize("config", [c for c in CONFIGURATIONS + PACKED if c.packs == 0], ids=name_of)
@pytest.mark.parametrize("layout", ["row_gap", "offset"])
@pytest.mark.parametrize("cols", [251, 253, 256])
@pytest.mark.parametrize("program", [softmax, layer_norm, reductions, affine_softmax, places])
def test_rows_are_read_elsewhere_in_a_pack(
    monkeypatch: pytest.MonkeyPatch, config: Config, layout: str, cols: int, program: Any
) -> None:
    """Than they are written, in every order of the threads, and with special values."""
    force(monkeypatch, config, cols, apart=True)
    dtype = "float16" if config.vec == 8 else "float32"
    for special in (False, True):
        check_in_orders(Case(program, (5, cols), dtype, layout, special))


@pytest.mark.rotates
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("program", [layer_norm, affine_softmax])
def test_lanes_get_the_values_of_columns_of_every_stage(
    monkeypatch: pytest.MonkeyPatch, program: Any, rows: int, packed: bool
) -> None:
    """Few are loaded once for all stages and rows of a lane, also those that only the last stage reads."""
    config = Config("row_lanes", 64, 1, 8, 2, rows=rows, packed=packed)
    force(monkeypatch, config, 16)
    case = Case(program, (5, 16), "float16")  # of the first block's rows most groups have none
    case.check(results_of(case))


def summed_and_shifted(x: Any) -> Any:
    """One stage, which reads a row once."""
    return x.sum(axis=1), x + 1


@pytest.mark.rotates
@pytest.mark.parametrize("program", [softmax, affine_softmax, summed_and_shifted])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("items", [2, 10])
def test_packs_arrive_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, items: int, cluster: int, program: Any
) -> None:
    """A thread computes packs while others are on their way, or all once they have arrived; clusters run many rows."""
    monkeypatch.setattr(kernel_launch, "_thread_blocks", lambda config, *_: 2 * config.cluster)
    force(monkeypatch, Config("row_shared", 64, items, 1, cluster=cluster, packs=1), 600 * cluster)
    check_in_orders(Case(program, (5, 600 * cluster), "float32"))


def doubled_softmax(x: Any) -> Any:
    x *= 2
    return cf.softmax(x, axis=1)


def doubled_shares(x: Any) -> Any:
    x *= 2
    return x / x.sum(axis=1, keepdims=True)


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS + PACKED, ids=name_of)
@pytest.mark.parametrize("program", [doubled_softmax, doubled_shares])
def test_arguments_change_where_rows_are_read_again(
    monkeypatch: pytest.MonkeyPatch, config: Config, program: Any
) -> None:
    """Stages that load a row again, or parts of it, or to compute it as written, load the row that was given."""
    cols = 251
    force(monkeypatch, config, cols)
    dtype = "float16" if config.vec == 8 else "float32"
    x = np.random.default_rng(7).uniform(0.5, 1, (3, cols)).astype(dtype)
    if dtype == "float32":
        x[0] = 1e-10 * np.arange(1, cols + 1)
        x[0, 17], x[0, 90] = 1e30, -1e30  # a sum that is small, so quotients that are not finite
    with HOST.active():
        changed = HOST.xp.empty(x.shape, x.dtype)
        changed[...] = x
        found = HOST.host(cf.fuse(program)(changed))
        expected = HOST.host(cf.fuse(lambda y: program(y * 1))(changed / 2))
    assert_equal(np.asarray(changed), x * x.dtype.type(2))
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=2e-6)


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS + PACKED, ids=name_of)
def test_quotients_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """By sums that overflow, or are too small for a reciprocal: divided as written, in place, and summed once."""

    def sums_of_shares(x: Any) -> Any:
        x /= x.sum(axis=1, keepdims=True)
        return (x + 1).sum(axis=1)

    cols = 251
    config = replace(config, vec=min(4, config.vec))
    force(monkeypatch, config, cols)
    x = np.random.default_rng(3).uniform(0.5, 1, (4, cols)).astype(np.float32)
    x[0] = 1e38
    x[2] = 1e-36 * np.arange(1, cols + 1)
    exact = x.astype(np.float64)
    expected = exact / exact.sum(1, keepdims=True)
    expected[0] = 0
    with HOST.active():
        shares = HOST.array(x)
        sums = HOST.host(cf.fuse(sums_of_shares)(shares))
    np.testing.assert_allclose(HOST.host(shares), expected, rtol=1e-6)
    np.testing.assert_allclose(sums, (expected + 1).sum(1), rtol=1e-6)


@pytest.mark.parametrize("cols", [700, 2048, 50257])
def test_totals_of_two_types(cols: int) -> None:
    """Those of a later stage are aligned where the earlier ones have another size."""

    def both(x: Any) -> tuple[Any, Any]:
        shares = cf.softmax(x, axis=1)
        return shares, (shares.astype("float64") * x).sum(axis=1)

    x = np.random.default_rng(cols).standard_normal((2, cols)).astype(np.float32)
    exact = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    exact /= exact.sum(1, keepdims=True)
    with HOST.active():
        shares, sums = cf.fuse(both)(x)
    np.testing.assert_allclose(np.asarray(shares), exact, rtol=4e-6)
    np.testing.assert_allclose(np.asarray(sums), (exact * x).sum(1), rtol=1e-5)


@pytest.mark.parametrize("cols", [24001, 57344, 61000, 86016, 200704])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_blocks_fit_a_multiprocessor(cols: int, dtype: str) -> None:
    """With all totals of programs that have several of the largest ones."""

    def entropies(x: Any) -> tuple[Any, Any]:
        logs = cf.log_softmax(x, axis=1)
        return (np.exp(logs) * logs).sum(axis=1), logs.sum(axis=1)

    for function in (softmax, entropies):
        plan = cf.fuse(function).plan(cf.spec((64, cols), dtype))
        for step in plan.steps:
            program = Program(step, plan.scheduled.storage)
            config = default_config(program, next(accesses(program)), clusters=True)
            if config.packs:
                (kernel,) = emit_kernels(program, config)
                static = 2 * (config.threads // 32 + config.cluster) * state_size(step) + 16
                assert kernel.shared + static <= 227 << 10


def norm_and_shares(x: Any, dy: Any, z: Any) -> Any:
    """Three matrices and four reductions, as the backward pass of a norm whose operand has another gradient."""
    y = normalised(x)
    return dy - dy.mean(axis=1, keepdims=True) - y * (dy * y).mean(axis=1, keepdims=True) + z


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lanes_hold_no_more_of_a_short_row_than_they_have_registers_for(dtype: str) -> None:
    """With more, a row of 20 columns would take a block."""
    for cols in range(2, 257):
        program = program_of(norm_and_shares, *[cf.spec((1 << 20, cols), dtype)] * 3)
        config = default_config(program, next(accesses(program)), clusters=True)
        assert config.template == "row_lanes", cols


def weighted_shares(x: Any) -> Any:
    """Exponentials that two stages read."""
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / (1 + (powers * x).sum(axis=1, keepdims=True)), powers.sum(axis=1)


@pytest.mark.parametrize(
    ("config", "kept"), [(Config("row_lanes", 64, 3, 4, 32), True), (Config("row_block", 64, 2, 4), False)], ids=str
)
def test_terms_of_a_sum_are_kept_where_the_maximum_of_the_row_is_known(config: Config, kept: bool) -> None:
    """The threads of a block know that of their own elements when they add up."""
    (kernel,) = emit_kernels(program_of(weighted_shares, cf.spec((5, 256))), config)
    assert ("const float distance = " in kernel.source) == kept
    assert kernel.source.count("exp(") == 1  # where the sum is made, or behind it


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("function", [softmax, lambda x: cf.logsumexp(x, axis=1)])
def test_every_single_element_has_a_lane(function: Any, dtype: str) -> None:
    for cols in range(32, 1024, 7):
        program = program_of(function, cf.spec((64, cols), dtype))
        for access in accesses(program):
            config = default_config(program, access, clusters=True)
            if config.template == "row_lanes":
                assert config.group >= ((3 if access.apart else 2) * (access.vec - 1) if access.shifted else 1)
                assert config.group * config.items * config.vec >= cols


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "rows"),
    [
        (softmax, (1 << 24, 16), "bfloat16", 2),
        (softmax, (1 << 24, 4), "bfloat16", 4),
        (softmax, (1 << 24, 16), "float32", 1),  # a lane reads and writes enough of a row
        (lambda x: cf.logsumexp(x, axis=1), (1 << 24, 16), "float32", 1),
        (lambda x: x.max(axis=1), (1 << 24, 64), "bfloat16", 2),
        (normalised, (1 << 24, 16), "float32", 1),
        (normalised, (1 << 24, 16), "bfloat16", 4),  # a lane waits for two reductions
        (softmax, (1 << 12, 16), "bfloat16", 1),  # there would be too few blocks
        (softmax, (1 << 24, 16), "float64", 1),
        (lambda x: x.sum(axis=1), (1 << 24, 4), "float64", 1),  # an element takes two registers
    ],
)
def test_lanes_load_several_rows_where_they_have_little_of_one(
    function: Any, shape: Any, dtype: str, rows: int
) -> None:
    program = program_of(function, cf.spec(shape, dtype))
    config = default_config(program, next(accesses(program)), clusters=True)
    assert (config.template, config.rows) == ("row_lanes", rows)


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "packed"),
    [
        (softmax, [(1 << 20, 128)], "bfloat16", False),
        (softmax, [(1 << 20, 1000)], "bfloat16", False),  # exponentials are held
        (softmax, [(1 << 20, 1000)], "float32", True),  # so many registers has no lane
        (normalised, [(1 << 20, 768)], "float32", False),
        (normalised, [(1 << 20, 768)], "bfloat16", True),  # two values, neither of them an exponential
        (lambda x: cf.softmax(normalised(x), axis=1), [(1 << 20, 768)], "bfloat16", False),
        (norm_and_shares, [(1 << 20, 256)] * 3, "bfloat16", True),  # three values of each element
        (lambda x: cf.logsumexp(x, axis=1), [(1 << 20, 512)], "bfloat16", False),
        (lambda x: cf.logsumexp(x, axis=1), [(1 << 20, 640)], "bfloat16", True),  # a fifth more lanes would be idle
        (lambda x: cf.logsumexp(x, axis=1), [(1 << 20, 1000)], "bfloat16", True),  # all of a warp would merge
        (lambda x, y: cf.logsumexp(x, axis=1) + y.max(axis=1), [(1 << 20, 512)] * 2, "bfloat16", True),
    ],
)
def test_lanes_hold_values_where_they_are_few(function: Any, shapes: Any, dtype: str, packed: bool) -> None:
    program = program_of(function, *[cf.spec(shape, dtype) for shape in shapes])
    config = default_config(program, next(accesses(program)), clusters=True)
    assert (config.template, config.packed) == ("row_lanes", packed)


def test_lanes_compute_the_exponentials_of_a_softmax_once() -> None:
    """They are those that its sum adds up, as the maximum of the row is known to all lanes before."""
    program = program_of(softmax, cf.spec((1 << 20, 128), "bfloat16"))
    config = default_config(program, next(accesses(program)))
    once, again = (
        emit_kernels(program, replace(config, packed=p))[0].source.split("struct Program {")[1] for p in (False, True)
    )
    assert ("add_terms(t.t0" in once, once.count("_exp(")) == (True, 0)
    assert again.count("_exp(") == 1  # where the result is stored, again


@pytest.mark.parametrize(
    ("function", "arrays", "template"),
    [
        (softmax, [(64, 262144)], "row_shared"),
        (softmax, [(64, 524288)], "row_shared"),  # one block on a multiprocessor, instead of rows that are read twice
        (affine_softmax, [(64, 524288), 524288, 524288], "row_stream"),  # but not where columns have values
        (normalised, [(64, 524288)], "row_shared"),
    ],
)
def test_the_longest_rows_that_a_cluster_holds(function: Any, arrays: Any, template: str) -> None:
    program = program_of(function, *map(cf.spec, arrays))
    assert default_config(program, next(accesses(program)), clusters=True).template == template


def test_without_a_place_for_a_cluster_rows_are_read_again() -> None:
    (step,) = cf.fuse(softmax).plan(cf.spec((64, 524288))).steps
    storage = dict.fromkeys((*step.inputs, *step.outputs), "float32")
    launch = kernel_launch.KernelLaunch(step, storage, lambda node: kernel_launch.Place(0, 524288, 1), -1, -1, True)
    assert launch.config.cluster > 8

    class Runtime:
        """Of a GPU that has no place for large clusters."""

        processors = 132

        def function(self, kernel: Any) -> Any:
            if kernel.cluster > 8:
                raise ClusterError("no place")
            return kernel

    with pytest.warns(RuntimeWarning, match="no place, so rows are read from memory for each stage"):
        bound = launch.bind(Runtime(), -1)  # type: ignore[arg-type]
    assert [call.function.config.template for call in bound.kernels] == ["row_stream"]


ANYWHERE = {
    "rows": lambda y, bias, factor: softmax(y),
    "elements": lambda y, bias, factor: np.maximum(y, 0) * 0.5,
    "elements of columns and rows": lambda y, bias, factor: (y + bias) * factor,
}


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("cols", [256, 260, 263])
@pytest.mark.parametrize("name", ANYWHERE)
def test_arrays_may_begin_anywhere(name: str, dtype: str, cols: int) -> None:
    """Argument and result at every element of a vector, together and apart; nothing beside the result is written."""
    rng = np.random.default_rng(cols)
    data, bias, factor = (normal(rng, shape, dtype) for shape in ((3, cols), cols, (3, 1)))
    exact = [a.astype(np.float64) for a in (data, bias, factor)]
    with np.errstate(all="ignore"):
        expected = np.asarray(cf.fuse(ANYWHERE[name])(*exact))
    fused = cf.fuse(ANYWHERE[name])
    scale = np.abs(expected).max()
    with HOST.active():
        others = [HOST.array(bias), HOST.array(factor)]
        for start in range(8):
            for shift in (0, 1, 6):
                source, target = (
                    HOST.xp.empty(3 * cols + 16, dtype_of(dtype)),
                    HOST.xp.empty(3 * cols + 16, dtype_of(dtype)),
                )
                source[...] = 0
                target[...] = 7
                y = source[start : start + 3 * cols].reshape(3, cols)
                y[...] = data
                first = start + shift
                out = target[first : first + 3 * cols].reshape(3, cols)
                fused(y, *others, out=out)
                error = np.abs(np.asarray(out, np.float64) - expected).max() / scale
                assert error <= {"float64": 1e-14, "float32": 2e-6, "bfloat16": 4e-3}[dtype], (start, shift)
                around = np.concatenate([np.asarray(target[:first]), np.asarray(target[first + 3 * cols :])])
                assert (around == 7).all(), (start, shift)


@pytest.mark.parametrize(
    "shape",
    [(100, 130), (3, 9001), (2, 8192), (9000, 2), (17, 2048), (15, 4100), (1, 8192)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize("name", ["elements", "elements of columns and rows"])
def test_threads_have_several_packs(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]) -> None:
    """Of one row or neighbouring ones, shorter than a block and longer; nothing is computed twice in place."""
    monkeypatch.setattr(kernel_launch, "_ENOUGH_BLOCKS", 1)
    rng = np.random.default_rng(shape[1])
    y, bias, factor = (normal(rng, s, "float32") for s in (shape, shape[1], (shape[0], 1)))

    def function(y: Any, bias: Any, factor: Any) -> Any:
        y += ANYWHERE[name](y, bias, factor)

    expected = y.copy()
    function(expected, bias, factor)
    with HOST.active():
        changed = HOST.array(y)
        cf.fuse(function)(changed, HOST.array(bias), HOST.array(factor))
    np.testing.assert_allclose(HOST.host(changed), expected, rtol=1e-5, atol=1e-6)


def test_rows_are_shifted_where_that_needs_wider_vectors() -> None:
    def ways(cols: int, dtype: str, read: list[int] | None = None, written: list[int] | None = None) -> list[Access]:
        return list(accesses(program_of(softmax, cf.spec((64, cols), dtype)), read, written))

    assert ways(8192, "float32")[0] == Access(4)
    assert ways(8191, "float32")[0] == Access(4, True)
    assert ways(8191, "bfloat16")[0] == Access(8, True)
    assert ways(31, "bfloat16") == [Access(1)]  # as many single elements as threads
    assert ways(8192, "float32", [8196], [8192])[0] == Access(4)
    assert ways(8192, "float32", [8197], [8193])[0] == Access(4, True)
    assert ways(8192, "float32", [8193], [8192]) == [Access(1)]
    assert ways(8192, "float32", [8194])[:2] == [Access(2), Access(2, True)]
    assert ways(8192, "bfloat16", [8193], [8192]) == [Access(8, True, True), Access(1)]
    assert ways(8191, "bfloat16", [8192], [8191])[0] == Access(8, True, True)
    assert ways(8192, "bfloat16", [8192], [8192, 8193]) == [Access(1)]
    half = [Access(4), Access(4, True), Access(8, True, True), Access(2), Access(2, True), Access(1)]
    assert ways(8192, "bfloat16", [8196]) == half
    doubled = program_of(lambda y: y * 2, cf.spec((64, 8192)))
    assert list(accesses(doubled, [8193])) == [Access(4, True, True), Access(1)]
    biased = program_of(lambda y, bias: np.exp(y + bias), cf.spec((64, 8191)), cf.spec(8191))
    assert next(accesses(biased)) == Access(4, True)
    assert next(accesses(biased, cols=64 * 8191)) == Access(4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("cols", [8192, 8191, 32768, 50257, 262144])
def test_threads_hold_whole_rows(dtype: str, cols: int) -> None:
    """With clusters rows of any usual vocabulary are read once, without them those that one block can hold."""
    program = program_of(softmax, cf.spec((64, cols), dtype))
    config = default_config(program, next(accesses(program)), clusters=True)
    assert config.packed or config.template == "row_shared"
    assert config.threads * config.cluster * (config.packs or config.items) * config.vec >= cols
    in_registers = config.packs == 0
    assert not in_registers or config.items * config.vec * np.dtype(dtype_of(dtype)).itemsize <= 128
    alone = default_config(program, next(accesses(program)))
    assert alone.cluster == 1


@pytest.mark.parametrize(
    ("rows", "cols", "template"), [(8192, 20480, "row_block"), (8192, 32768, "row_shared"), (512, 20480, "row_shared")]
)
def test_many_norms_with_one_array_of_columns_have_a_block_of_their_own(rows: int, cols: int, template: str) -> None:
    """In the registers of up to 7 packs a thread; where exponentials are summed, or few rows, in shared memory."""
    matrix, vector = cf.spec((rows, cols)), cf.spec(cols)

    def config(function: Any) -> Config:
        program = program_of(function, matrix, vector)
        return default_config(program, next(accesses(program)), clusters=True)

    assert config(lambda y, a: y / np.sqrt((y * y).mean(axis=1, keepdims=True)) * a).template == template
    assert config(lambda y, a: cf.softmax(y + a, axis=1)).template == "row_shared"


@pytest.mark.parametrize(
    ("program", "shapes", "template"),
    [
        (softmax, [(3, 1024)], "row_lanes"),
        (softmax, [(3, 16384)], "row_block"),
        (lambda x, y: cf.softmax(x + y, axis=1), [(3, 1024)] * 2, "row_block"),
        (lambda x, y: cf.softmax(x + y, axis=1), [(3, 8192)] * 2, "row_block"),
        (lambda x, y: cf.softmax(x + y, axis=1), [(3, 12000)] * 2, "row_shared"),
        (lambda x, y: cf.softmax(x * y, axis=1), [(3, 1), (700,)], "row_block"),  # no array has all elements
    ],
)
def test_threads_hold_what_registers_hold_of_float64(program: Any, shapes: list[Any], template: str) -> None:
    """128 registers of a thread hold 32 elements of one array, or 16 of each of two."""
    step = program_of(program, *(cf.spec(shape, "float64") for shape in shapes))
    config = default_config(step, next(accesses(step)), clusters=True)
    assert config.template == template
    assert config.threads * config.blocks <= 512
    assert template == "row_shared" or config.items * config.vec * len(step.full_inputs) <= 32


@pytest.mark.parametrize(("count", "cols"), [(11, 4), (12, 1030), (40, 1)])
def test_more_float64_arrays_than_registers_hold(count: int, cols: int, rng: np.random.Generator) -> None:
    """A scan, which reads three rows a step: a division by zero in the choice of threads from 11 steps on."""

    def scan(x: Any, h: Any, a: Any) -> Any:
        sums = []
        for t in range(0, 3 * count, 3):
            h = a * h + x[t] * x[t + 1]
            sums.append((x[t + 2] * h).sum(axis=-1))
        return np.stack(sums)

    given = [normal(rng, shape, "float64", 0.1) for shape in ((3 * count, cols), cols, cols)]
    with HOST.active():
        found = HOST.host(cf.fuse(scan)(*map(HOST.array, given)))
    np.testing.assert_allclose(found, scan(*given), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cols", [7, 16])
def test_pointwise_work_without_gaps_is_one_row(monkeypatch: pytest.MonkeyPatch, cols: int) -> None:
    """So vectors need not fit a row. With gaps, values of rows or of columns it is not."""
    seen: list[tuple[int, int, Access]] = []
    bind = kernel_launch.KernelLaunch.bind

    def noted(self: kernel_launch.KernelLaunch, *arguments: Any) -> Any:
        seen.append((self.rows, self.cols, self.accesses[0]))
        return bind(self, *arguments)

    monkeypatch.setattr(kernel_launch.KernelLaunch, "bind", noted)
    rng = np.random.default_rng(cols)
    y, wide = (normal(rng, shape, "float32") for shape in ((8, cols), (8, cols + 1)))
    gelu = cf.fuse(lambda y: cf.gelu(y) * 2)
    scaled = cf.fuse(lambda y, a: y * a)
    with HOST.active():
        found = np.asarray(gelu(HOST.array(y)))
        gap = np.asarray(gelu(HOST.array(wide)[:, :cols]))
        by_rows = np.asarray(scaled(HOST.array(y), HOST.array(y[:, :1])))
        by_columns = np.asarray(scaled(HOST.array(y), HOST.array(y[0])))
    np.testing.assert_allclose(found, 2 * cf.gelu(y.astype(np.float64)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gap, 2 * cf.gelu(wide[:, :cols].astype(np.float64)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(by_rows, y * y[:, :1], rtol=1e-6)
    np.testing.assert_allclose(by_columns, y * y[0], rtol=1e-6)
    own = (8, cols, Access(4 if cols == 16 else 1))
    assert seen[0] == (1, 8 * cols, Access(4))
    assert seen[2:] == [own, own]
    assert seen[1][:2] == (8, cols)


@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    [
        ((61008, 1100), "bfloat16", ("row_stream", 128, 1, 4, 16)),
        ((3, 1100), "bfloat16", ("row_stream", 128, 1, 4, 16)),  # a row's bits do not depend on the number of rows
        ((3, 1537), "bfloat16", ("row_stream", 64, 1, 1, 32)),
        ((64, 50257), "bfloat16", ("row_stream", 512, 1, 1, 4)),
        ((3, 1100), "float32", ("row_stream", 64, 1, 1, 24)),
        ((64, 50257), "float32", ("row_stream", 256, 1, 1, 6)),
        ((64, 50257), "float64", ("row_stream", 256, 1, 1, 4)),
        ((3, 1 << 20), "float32", ("row_shares", 256, 1, 1, 6)),
    ],
)
def test_threads_that_read_a_row_once(
    shape: tuple[int, int], dtype: str, config: tuple[str, int, int, int, int]
) -> None:
    """Template, threads, packs in flight, rows of a block and blocks of a multiprocessor."""
    program = program_of(lambda x: x.sum(axis=1), cf.spec(shape, dtype))
    found = default_config(program, next(accesses(program)), clusters=True)
    assert (found.template, found.threads, found.items, found.rows, found.blocks) == config


def sums_and_places(x: Any) -> tuple[Any, ...]:
    """One stage; `reductions` has a variance, for which rows are held."""
    return x.sum(axis=1), cf.logsumexp(x, axis=1), x.argmax(axis=1), x.min(axis=1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of the kernels that are launched in a test."""
    found: list[Config] = []
    grids = kernel_launch._grids

    def noted(config: Config, rows: int, cols: int, at_once: int) -> list[tuple[int, int]]:
        found.append(config)
        return grids(config, rows, cols, at_once)

    monkeypatch.setattr(kernel_launch, "_grids", noted)
    return found


@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("cols", [1025, 1536])
def test_a_warp_reads_a_row(launched: list[Config], rows: int, cols: int) -> None:
    """Of 16 bits, with warps that have no row."""
    check_in_orders(Case(sums_and_places, (rows, cols), "float16"))
    assert {(config.template, config.rows) for config in launched} == {("row_stream", 4)}


def test_a_warp_reads_several_rows(monkeypatch: pytest.MonkeyPatch, launched: list[Config]) -> None:
    """One after the other, where there are more than all warps read at a time; none is read twice."""

    def added(x: Any, total: Any) -> Any:
        total += x.sum(axis=1, keepdims=True)
        return x.max(axis=1)

    monkeypatch.setattr(kernel_launch, "_thread_blocks", lambda config, *_: 2)
    x = np.random.default_rng(3).integers(-4, 5, (21, 1100)).astype(np.float16)
    before = np.arange(21, dtype=np.float32).reshape(21, 1)
    with HOST.active():
        total = HOST.array(before)
        largest = HOST.host(cf.fuse(added)(HOST.array(x), total))
        found = HOST.host(total)
    assert [(config.template, config.rows) for config in launched] == [("row_stream", 4)]
    assert_equal(np.asarray(largest), x.max(axis=1))
    assert_equal(np.asarray(found), before + x.astype(np.float32).sum(axis=1, keepdims=True))
