"""Every kernel that the planner can emit for the heads compiles for every architecture, without a GPU."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import cupyfuse as cf
from cupyfuse import heads
from cupyfuse.cuda import emit
from cupyfuse.cuda.compile import cubin
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.program import Program

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Row lengths that lead to every template, with and without vectors; few rows, and enough to split a column's.
SHAPES = ((64, 33, 96), (1024, 8192, 8192), (100_000, 5, 7), (16, 64, 50_257), (16, 64, 262_144))


def plans(dtype, shape):
    rows, k, n = shape
    x, w, b, c = cf.spec((rows, k), dtype), cf.spec((n, k), dtype), cf.spec(n, dtype), cf.spec(1, dtype)
    columns = {"running_mean": b, "running_var": b, "gamma": b, "beta": b, "scale": c}
    yield heads.head_logsumexp.plan(x, w, b)
    yield heads.head_sum.plan(x, w, b)
    yield heads.head_sum.bind(weight=w, bias=b).plan(x)
    yield heads.head_softmax.plan(x, w, b, training=True, **columns)
    bound = heads.head_softmax.bind(weight=w, bias=b, **columns).plan(x)
    yield bound
    yield bound.prepare
    yield cf.fuse(lambda y: cf.gelu(y)).plan(cf.spec((rows, n), dtype))


def sources(dtype):
    """The distinct texts of all kernels for a dtype, in the widest vectors and in none."""
    found = set()
    for shape in SHAPES:
        for plan in plans(dtype, shape):
            for step in plan.steps:
                if step.kind not in ("Gemm", "Copy"):
                    for aligned in (None, 1):
                        found |= {k.source for k in emit.kernels_of(step, plan.scheduled.storage, aligned)}
    return sorted(found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_compile(dtype, architecture):
    texts = sources(dtype)
    assert len(texts) >= 30
    with ThreadPoolExecutor(2) as pool:
        for code in pool.map(lambda text: cubin(text, architecture), texts):
            assert code[:4] == b"\x7fELF"


def test_guards_of_nested_products_compile():
    """What a guard evaluates as written can be products of products, which nothing else computes."""
    for function, shapes in (
        (lambda x, a, b: (x @ a.T @ b.T).sum(axis=1), ((8, 16), (20, 16), (30, 20))),
        (lambda x, a, b: (x.sum(axis=1, keepdims=True) @ a + a).sum(axis=1) + b, ((2, 2), (1, 2), (2,))),
        (lambda x: ((-x @ x.T) @ x).sum(axis=1), ((2, 0),)),
    ):
        plan = cf.fuse(function).plan(*map(cf.spec, shapes))
        for step in plan.steps:
            if step.kind not in ("Gemm", "Copy"):
                for kernel in emit.kernels_of(step, plan.scheduled.storage):
                    assert cubin(kernel.source, "sm_90")


def test_every_operator_compiles_in_both_types():
    """One kernel with every operator of the table in it, for float and for double."""
    from cupyfuse.operators import POINTWISE
    from cupyfuse.trace import apply

    def everything(x, y, z):
        total = x
        for name, row in POINTWISE.items():
            operands = (x > y, y, z) if name == "where" else (x, y, z)[: row.arity]
            if name.startswith("logical"):
                operands = tuple(o > 0 for o in operands)
            value = apply(name, *operands)
            total = total + (cf.fuse(lambda v: v * 1.0).__wrapped__(value) if row.result != "bool" else value * 1.0)
        return total

    for dtype in ("float32", "float64"):
        plan = cf.fuse(everything).plan(*[cf.spec((8, 64), dtype)] * 3)
        (kernel,) = emit.kernels_of(plan.steps[0], plan.scheduled.storage)
        assert cubin(kernel.source, "sm_90")


def test_float_kernels_compute_nothing_in_double():
    """A literal or a function of the wrong type would cost most of the speed, silently."""
    plan = heads.head_logsumexp.plan(cf.spec((64, 64)), cf.spec((4096, 64)), cf.spec(4096))
    step = plan.steps[-1]
    program = Program(step, plan.scheduled.storage)
    text = emit.emit(program, default_config(program, 4)).source
    struct = re.sub(r"double \w+;|static_cast<float>\(\w+\)", "", text[text.index("struct Program") :])
    assert "double" not in struct
    assert not re.search(r"\d\.\d+(?![0-9f])", struct), "a literal without its suffix is a double"


def test_a_compiler_error_is_told_with_its_log():
    with pytest.raises(cf.EngineError, match="undefined"):
        cubin('extern "C" __global__ void k() { undefined_name(); }', "sm_90")
