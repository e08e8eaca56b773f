"""Emission: what a step becomes in CUDA C."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.cuda import emit, sources
from cupyfuse.cuda.config import Access, fitting_vec
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.expressions import formatted, literal
from cupyfuse.cuda.fingerprint import fingerprint_kernel
from cupyfuse.cuda.kernel import header
from cupyfuse.cuda.program import Program
from cupyfuse.ir.operators import POINTWISE

SOFTMAX = """\
    template <int V>
    __device__ auto element(At<0>, const Tile0<V>& tile, int j, i64 row, i64 col, const Row& r, Element& e, \
Out0<V>& out) const {
        const float at_in_x = widen(tile.in_x, j);
        e.in_x = at_in_x;
        return 0.0f;
    }"""

SOFTMAX_END = """\
    template <class Team>
    __device__ void finish(At<0>, const Totals0& t, const Team& team, i64 row, Row& r) const {
        r.v0 = t.t0.extreme();
        r.v3 = t.t0.total();
        r.v3_reciprocal = reciprocal_of(r.v3);
    }"""


def source(function, *specs, **options) -> str:
    return cf.fuse(function).plan(*specs, **options).source()


def test_softmax_is_the_text_that_a_reader_expects():
    text = source(lambda x: cf.softmax(x, axis=1), cf.spec((64, 4096)))
    assert SOFTMAX in text
    assert SOFTMAX_END in text
    assert "row_block<Program, 256, 4, 4>(p);" in text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (1, "float", "1.0f"),
        (0.01, "float", "0.01f"),
        (-2.5, "float", "(-2.5f)"),
        (-0.0, "float", "(-0.0f)"),
        (1e-30, "float", "1e-30f"),
        (1e300, "float", "infinity<float>()"),
        (-np.inf, "double", "(-infinity<double>())"),
        (np.nan, "float", "(infinity<float>() - infinity<float>())"),
        (0.1, "double", "0.1"),
        (True, "bool", "true"),
        (7, "i64", "7LL"),
    ],
)
def test_literals(value, kind, text):
    assert literal(value, kind) == text


def test_constants_of_expressions_take_the_type():
    assert formatted("T(0.5) * {0} + T({1} > 0)", ["a", "b"], "float") == "0.5f * a + float(b > 0)"


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_expressions_take_their_operands_and_leave_no_placeholder(name):
    row = POINTWISE[name]
    text = formatted(row.cuda, [f"operand{i}" for i in range(row.arity)], "double")
    assert all(f"operand{i}" in text for i in range(row.arity))
    assert not re.search(r"[{}]|\bT\(", text)


def test_the_text_does_not_depend_on_the_number_of_rows():
    def head(y, mean, var):
        return cf.softmax(cf.batch_norm(y, mean, var, training=True), axis=1)

    texts = {source(head, cf.spec((rows, 512)), cf.spec(512), cf.spec(512)) for rows in (300, 301, 400)}
    assert len(texts) == 1


def test_float_arguments_are_parameters_so_that_another_value_needs_no_compilation():
    def scaled(x, slope):
        return cf.leaky_relu(x, slope)

    texts = {source(scaled, cf.spec((4, 8)), slope) for slope in (0.1, 0.2)}
    assert len(texts) == 1
    assert "double in_slope;" in texts.pop()


@pytest.mark.parametrize("name", ["float", "row", "exp", "x_rows", "v0", "out0", "Program", "at_x", "_", "total"])
def test_argument_names_cannot_break_the_text(name):
    scope: dict[str, object] = {"cf": cf}
    identifier = "arg_" if name == "float" else name
    exec(f"def f(x, {identifier}): return cf.softmax(x * {identifier}, axis=1)", scope)
    plan = cf.fuse(scope["f"]).plan(cf.spec((3, 8)), cf.spec(8))  # type: ignore[arg-type]
    kernel = sources.kernels_of(plan.steps[0], plan.scheduled.storage)[0]
    names = [p.name for p in kernel.parameters]
    assert len(set(names)) == len(names) == 3
    assert not {"float", "row", "exp", "v0", "Program", "total"} & set(names)


def test_guards_are_computed_without_branches_first():
    def scaled(x, w, b, scale, shift):
        return cf.relu(((x @ w.T) + b) / scale * shift)

    text = source(scaled, cf.spec((8, 16)), cf.spec((32, 16)), *[cf.spec(32)] * 3)
    assert "const float v4 = v3;" in text
    assert "return v4;" in text
    assert "exact_element(At<0>" in text


def test_what_is_recomputed_as_written_is_in_the_text_once_for_all_elements_of_a_row():
    def standardised(x, scale):
        y = (x - x.mean(axis=1, keepdims=True)) * scale
        return np.tanh(y / np.sqrt((y * y).mean(axis=1, keepdims=True)))

    text = source(standardised, cf.spec((4096, 1024)), cf.spec(1024))
    function = text[text.index("__noinline__") :]
    head, call = function[: function.index("{")], function[function.index("exact_element(") :]
    # What is passed is what is read, value by value: no struct, and no value that nothing else needs any more.
    assert re.search(r"\((decltype\(Row::\w+\) r_\w+, ){2}float tile_in_x, float tile_in_scale\) $", head)
    assert "tanh(" in function[: function.index("return {")] and "tanh(" not in call[: call.index("}")]
    assert "= exact" in call[: call.index("}")]


def test_collapsed_sums_can_be_repaired_by_the_threads_of_a_row():
    text = source(lambda x, w: (x @ w.T).sum(axis=1), cf.spec((8, 16)), cf.spec((32, 16)))
    assert "repair_" in text
    assert "for (i64 col = 0; col < 32; ++col)" in text


def test_headers_are_put_in_place_once():
    plan = cf.fuse(lambda x: x.sum(axis=1)).plan(cf.spec((8, 4096)))
    text = plan.source(inline=True)
    assert "#include" not in text
    assert text.count("struct ExpSum") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "template"),
    [
        ((1000, 1), "float32", "row_lanes"),
        ((1000, 31), "float32", "row_lanes"),
        ((1000, 1024), "float32", "row_lanes"),
        ((1000, 1025), "float32", "row_block"),
        ((10, 8192), "float64", "row_block"),
        ((10, 30000), "float32", "row_block"),
        ((600, 1_000_003), "float32", "row_stream"),
    ],
)
def test_the_template_follows_the_row_length(shape, dtype, template):
    plan = (
        cf.fuse(lambda x: cf.softmax(x, axis=1) if x.shape[1] > 1 else cf.softmax(x @ x.T[:, :], axis=1)).plan(
            cf.spec(shape, dtype)
        )
        if shape[1] > 1
        else cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((1000, 2), dtype))
    )
    program = Program(plan.steps[-1], plan.scheduled.storage)
    assert default_config(program, Access(fitting_vec(program))).template == template


@pytest.mark.parametrize("cols", [1, 2, 3, 5, 31, 33, 100, 1023, 1025, 2047, 4096, 8191, 16385, 32768, 32769, 100001])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("form", ["softmax", "affine", "sum"])
def test_configurations_cover_the_row(cols, dtype, form):
    """Every element of a row has a thread, and blocks are of a size that GPUs take."""
    functions = {
        "softmax": lambda x, a: cf.softmax(x, axis=1) + 0 * x,
        "affine": lambda x, a: cf.softmax(x * a + a, axis=1) - x,
        "sum": lambda x, a: (x * a).sum(axis=1, keepdims=True),
    }
    plan = cf.fuse(functions[form]).plan(cf.spec((7, cols), dtype), cf.spec(cols, dtype))
    for step in plan.steps:
        program = Program(step, plan.scheduled.storage)
        config = default_config(program, Access(fitting_vec(program)))
        assert 32 <= config.threads <= 1024
        assert config.threads % 32 == 0
        assert cols % config.vec == 0
        if config.template == "row_block":
            assert config.threads * config.items * config.vec >= cols
        if config.template == "row_lanes":
            assert config.group * config.items * config.vec >= cols
            assert 32 % config.group == 0


@pytest.mark.parametrize(("dtype", "vec"), [("float32", 4), ("bfloat16", 8)])
@pytest.mark.parametrize(("packs", "blocks"), [(4096, 2), (4097, 2), (5120, 2), (5121, 1), (8192, 1)])
def test_two_blocks_share_a_multiprocessor_where_each_has_room_for_a_row(dtype, vec, packs, blocks):
    def config_of(function, cols, shifted=False, columns=0):
        plan = cf.fuse(function).plan(cf.spec((8192, cols), dtype), *[cf.spec(cols, dtype)] * columns)
        return default_config(Program(plan.steps[0], plan.scheduled.storage), Access(vec, shifted), True)

    config = config_of(lambda x: cf.softmax(x, axis=1), packs * vec)
    assert (config.template, config.blocks) == ("row_block", blocks)
    assert config.threads * config.items >= packs and config.threads * config.blocks <= 1024
    alone = config_of(lambda x: x / np.sqrt((x * x).sum(axis=1, keepdims=True)), packs * vec)
    # One block, which waits for itself, gains with 8 packs for each thread.
    assert (alone.blocks, alone.evict_last, config.evict_last) == (blocks, True, blocks > 1 or packs == 8192)
    if packs > 4096:  # of rows that are shifted, or with values of columns, no block has a multiprocessor to itself
        assert config_of(lambda x: cf.softmax(x, axis=1), packs * vec + 1, shifted=True).template == "row_shared"
        assert config_of(lambda x, a: cf.softmax(x * a, axis=1), packs * vec, columns=1).template == "row_shared"


def norm_of_a_gate_backward(x, gate, dy):
    """The gradients of an RMS norm of silu(x) * gate: seven values an element, and more FLOPs than are repeated."""
    s = 1 / (1 + np.exp(-x))
    y = x * s * gate
    r = 1 / np.sqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
    n = y * r
    d = r * (dy - n * (dy * n).mean(axis=1, keepdims=True))
    return d * gate * np.tanh(s * (1 + x * (1 - s))), d * np.exp(-np.abs(np.sin(x * s))), n


@pytest.mark.parametrize("cols", [64, 256, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_rows_with_many_values_an_element_stay_in_registers(cols, dtype):
    plan = cf.fuse(norm_of_a_gate_backward).plan(*[cf.spec((10_000, cols), dtype)] * 3)
    program = Program(plan.steps[0], plan.scheduled.storage)
    assert program.held_values > 3
    for clusters in (False, True):
        config = default_config(program, Access(fitting_vec(program)), clusters)
        assert config.template in ("row_lanes", "row_block") and not config.packed


def softmax_of_standardised(x):
    centred = x - x.mean(axis=1, keepdims=True)
    return cf.softmax(centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5), axis=1)


def in_lanes(function, *specs):
    plan = cf.fuse(function).plan(*specs)
    program = Program(plan.steps[0], plan.scheduled.storage)
    config = default_config(program, Access(fitting_vec(program)), True)
    assert config.template == "row_lanes"
    return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [36, 50, 100, 102, 136, 200])
def test_lanes_hold_values_of_short_rows_and_one_row_of_several_packs_at_a_time(cols, dtype):
    """Also where as many lanes, or fewer, would be idle if they held the row as it was loaded."""
    config = in_lanes(softmax_of_standardised, cf.spec((1 << 20, cols), dtype))
    assert not config.packed
    assert config.items > 1 and config.rows == 1


@pytest.mark.parametrize(("cols", "rows"), [(196, 2), (204, 2), (128, 1), (256, 1)])
def test_lanes_load_two_rows_that_begin_within_sectors_and_read_two_arrays_of_columns(cols, rows):
    """Rows that begin with a sector of a cache, of 32 bytes, ask for no more of them than they have bytes."""
    vectors = [cf.spec(cols, "bfloat16")] * 2
    config = in_lanes(lambda x, a, b: cf.softmax(x * a + b, axis=1), cf.spec((1 << 20, cols), "bfloat16"), *vectors)
    assert config.rows == rows
    one = in_lanes(lambda x: cf.softmax(x, axis=1), cf.spec((1 << 20, cols), "bfloat16"))
    assert one.rows == 1


def layer_norm(x):
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("function", "dtype", "cols", "lanes", "rows"),
    [
        (lambda x: cf.softmax(x, axis=1), "bfloat16", 60, 8, 2),
        (lambda x: cf.softmax(x, axis=1), "bfloat16", 100, 16, 2),
        (lambda x: cf.softmax(x, axis=1), "bfloat16", 196, 16, 1),  # 32 lanes would have two packs each
        (lambda x: cf.softmax(x, axis=1), "float32", 30, 8, 2),
        (lambda x: cf.log_softmax(x, axis=1), "float32", 30, 8, 2),
        (lambda x: cf.log_softmax(x, axis=1), "float32", 15, 4, 2),  # of one element
        (layer_norm, "bfloat16", 60, 8, 4),
        (layer_norm, "bfloat16", 100, 8, 1),  # 16 lanes would merge twice
        (layer_norm, "float32", 30, 8, 2),  # values
        (layer_norm, "float32", 15, 8, 4),
        (softmax_of_standardised, "bfloat16", 60, 4, 1),  # merges more
        (lambda x: layer_norm(cf.silu(x)), "float32", 30, 4, 1),  # computes more again
        (lambda x: layer_norm(cf.silu(x)), "bfloat16", 16, 2, 2),
    ],
)
def test_up_to_8_lanes_have_two_narrow_packs_and_several_rows(function, dtype, cols, lanes, rows):
    config = in_lanes(function, cf.spec((1 << 20, cols), dtype))
    assert (config.group, config.rows) == (lanes, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [17, 34, 50, 51, 66, 100, 102, 136, 196, 257, 1000])
@pytest.mark.parametrize("columns", [0, 2])
def test_the_lanes_of_a_short_row_do_not_depend_on_the_number_of_rows(columns, cols, dtype):
    """So neither do a row's bits; only how many rows lanes load before they compute one does."""

    def standardised(x, *vectors):
        for vector in vectors:
            x = x * vector
        return softmax_of_standardised(x)

    vectors = [cf.spec(cols, dtype)] * columns
    found = [in_lanes(standardised, cf.spec((rows, cols), dtype), *vectors) for rows in (1, 2, 3, 1000, 1 << 24)]
    assert len({replace(config, rows=1, evict_last=False) for config in found}) == 1


@pytest.mark.parametrize(("dtype", "items"), [("bfloat16", 7), ("float32", 4)])
def test_lanes_hold_more_narrow_packs_of_16_bits(dtype, items):
    """102 columns are 51 packs of two elements: in 8 lanes of 16 bits, in 16 of float32."""
    assert in_lanes(lambda x: cf.softmax(x, axis=1), cf.spec((1 << 20, 102), dtype)).items == items
    shared = in_lanes(lambda x, y: cf.softmax(x * y, axis=1), *[cf.spec((1 << 20, 102), dtype)] * 2)
    assert shared.items == 4  # of several matrices no more


def norm_of_silu(x, a, b):
    x = cf.silu(x)
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5) * a + b


@pytest.mark.parametrize(("cols", "group", "items"), [(34, 4, 5), (50, 8, 4), (66, 8, 5)])
def test_few_lanes_of_a_norm_have_few_narrow_packs(cols, group, items):
    config = in_lanes(norm_of_silu, cf.spec((1 << 20, cols), "bfloat16"), *[cf.spec(cols, "bfloat16")] * 2)
    assert (config.group, config.items) == (group, items)


@pytest.mark.parametrize(("cols", "items"), [(50, 4), (66, 5)])
def test_lanes_hold_fewer_narrow_packs_of_two_matrices(cols, items):
    matrices = [cf.spec((1 << 20, cols), "bfloat16")] * 2
    assert in_lanes(lambda x, y: cf.softmax(np.where(y > 0, x * 0.125, -1e9), axis=1), *matrices).items == items


def test_lanes_with_many_packs_load_one_row():
    vectors = [cf.spec(51, "bfloat16")] * 2
    config = in_lanes(lambda x, a, b: cf.softmax(x * a + b, axis=1), cf.spec((1 << 20, 51), "bfloat16"), *vectors)
    assert (config.items, config.rows) == (7, 1)


@pytest.mark.parametrize("function", [norm_of_a_gate_backward, lambda x, gate, dy: cf.softmax(x * gate, axis=1) * dy])
def test_values_that_are_held_are_fields_of_elements(function):
    """No more are counted than the Element has, beside those that a stage only reduces."""
    plan = cf.fuse(function).plan(*[cf.spec((1000, 2048))] * 3)
    program = Program(plan.steps[0], plan.scheduled.storage)
    text = emit.emit(
        program, replace(default_config(program, Access(4)), template="row_block", packed=False, packs=0)
    ).source
    fields = re.search(r"struct Element {(.*?)};", text)[1].count("float ")
    assert 1 <= program.held_values <= fields


def test_every_kernel_follows_earlier_launches():
    """Before it touches memory: at its entry, or behind the prologue that two templates have."""
    x, w = cf.spec((1024, 8192)), cf.spec((8192, 8192))
    half = [cf.spec(s.shape, "bfloat16") for s in (x, w)]
    plans = [
        cf.fuse(lambda x, w: cf.softmax(x @ w.T + 1.0)).plan(x, w),
        cf.fuse(lambda x, w: cf.logsumexp(x @ w, axis=1)).plan(x, w),
        cf.fuse(lambda x, w: (cf.gelu(x @ w.T) - x.mean(axis=0)).sum(axis=0), precision="high").plan(x, w),
        cf.fuse(lambda x: np.exp(x)).plan(x),
    ]
    with cf.settings.epilogues("always"):
        plans.append(cf.fuse(lambda x, w: cf.logsumexp(x @ w.T, axis=1)).plan(*half))
    text = "\n".join(plan.source() for plan in plans) + fingerprint_kernel(2).source
    entries = re.findall(r'extern "C" __global__ void .*?(\w+)\(const .*Program p\) \{\n *(.*)\n', text)
    own = {"gemm_kernel": "gemm", "split_gemm_kernel": "split_gemm"}
    assert len(entries) > 10 and own.keys() <= {name for name, _ in entries}
    for name, first in entries:
        if name in own:
            _, _, body = header(f"{own[name]}.cu").partition(f"void {own[name]}(const P& p) {{")
            before, follows, _ = body.partition("follow_earlier_launches();")
            assert follows and "stream_operands" not in before and "copy_operands" not in before
        else:
            assert first == "follow_earlier_launches();", name
