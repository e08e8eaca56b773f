"""Values that are broadcast along an axis in the middle: row programs read their rows by index, not from a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from masks import force_plans
from support import Engine, dtype_of, normal, unit

import cupyfuse as cf

Shape = tuple[int, ...]
# The shapes of a value and of what is broadcast to it, and whether the copy is left out.
SHAPES: dict[str, tuple[Shape, Shape, bool]] = {
    "a key mask for all heads": ((3, 2, 5, 16), (3, 1, 1, 16), True),
    "a mask for all heads": ((3, 2, 5, 16), (3, 1, 5, 16), True),
    "a number for each image": ((3, 7, 24), (3, 1, 1), False),
    "a scale for each image": ((3, 7, 24), (3, 1, 24), True),
    "a number for each query": ((3, 2, 5, 16), (3, 1, 5, 1), True),
    "a slope for each head": ((3, 2, 5, 16), (2, 1, 16), True),
    "a slope for each head of each image": ((3, 2, 5, 16), (3, 2, 1, 16), True),
    "the last axis but one, in rounds": ((2, 3, 4, 5, 16), (2, 1, 4, 1, 16), True),
    "rows that begin between packs": ((3, 2, 5, 7), (3, 1, 5, 7), False),
    "one row in each block": ((4, 2, 1, 8), (4, 1, 1, 8), True),
    "five axes": ((2, 3, 2, 2, 8), (2, 1, 1, 2, 8), True),
    "two repeated axes apart": ((2, 3, 2, 3, 8), (2, 1, 2, 1, 8), True),
    "wide rows": ((2, 3, 2, 2304), (2, 1, 2, 2304), True),
    "many rows": ((5, 40, 3, 16), (5, 1, 3, 16), True),
    "nothing": ((3, 0, 5, 16), (3, 1, 5, 16), False),
}
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, m: cf.softmax(x * 0.5 + m, axis=-1),
    "modulated norm": lambda x, m: (x - x.mean(axis=-1, keepdims=True)) / (1 + x.std(axis=-1, keepdims=True)) * m + m,
    "elements": lambda x, m: np.maximum(x, m) * m,
    "sums of rows": lambda x, m: (x * m).sum(axis=-1),
    "sums of columns": lambda x, m: (x * m).reshape(-1, x.shape[-1]).sum(axis=0),
    "both": lambda x, m: (np.exp(x * m), cf.logsumexp(x + m, axis=-1), (x * m).max(axis=0)),
}


def check(engine: Engine, program: Callable[..., Any], x: Any, m: Any, layout: str = "contiguous") -> Any:
    """Compare a program with itself in float64; return its plan."""
    fused = cf.fuse(program)
    arguments = [engine.array(x, layout), engine.array(m)]
    with force_plans(), np.errstate(all="ignore"):
        found = engine.host(fused(*arguments))
        plan = fused.plan(*arguments)
        expected = program(x.astype(np.float64), m.astype(np.float64) if m.dtype.kind not in "bi" else m)
    for ours, exact in zip(
        found if isinstance(found, tuple) else (found,),
        np.atleast_1d(expected) if False else (expected if isinstance(expected, tuple) else (expected,)),
        strict=True,
    ):
        assert ours.shape == exact.shape
        size = np.abs(exact).max(initial=1.0) * max(1, x.shape[-1]) ** 0.5
        assert np.abs(ours.astype(np.float64) - exact).max(initial=0) <= 64 * unit(x.dtype.name) * size
    return plan


def copies(plan: Any) -> int:
    return sum(step.kind == "Copy" for step in plan.steps)


def as_name(words: str) -> str:
    return words.replace(" ", "_")


@pytest.mark.parametrize("shapes", SHAPES, ids=as_name)
@pytest.mark.parametrize("program", PROGRAMS, ids=as_name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_come_again(engine: Engine, shapes: str, program: str, dtype: str) -> None:
    shape, other, left_out = SHAPES[shapes]
    rng = np.random.default_rng(len(shapes))
    x, m = normal(rng, shape, dtype), normal(rng, other, dtype)
    if 0 in shape and program == "both":
        shape = (3, 2, 5, 16)
        x = normal(rng, shape, dtype)
    plan = check(engine, PROGRAMS[program], x, m)
    if left_out:
        assert copies(plan) == 0


@pytest.mark.parametrize("layout", ["row_gap", "offset", "reversed", "fortran"])
@pytest.mark.parametrize("program", ["softmax", "sums of columns"])
def test_beside_other_layouts(engine: Engine, layout: str, program: str) -> None:
    rng = np.random.default_rng(1)
    check(engine, PROGRAMS[program], normal(rng, (3, 2, 5, 48)), normal(rng, (3, 1, 5, 48)), layout)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(engine: Engine, dtype: str) -> None:
    rng = np.random.default_rng(2)
    check(engine, PROGRAMS["softmax"], normal(rng, (3, 2, 5, 16), dtype), normal(rng, (3, 1, 5, 16), dtype))


def test_masks_of_bools(engine: Engine) -> None:
    rng = np.random.default_rng(3)
    x, mask = normal(rng, (3, 2, 5, 16)), rng.random((3, 1, 1, 16)) < 0.5
    mask[1] = False
    fused = cf.fuse(lambda x, mask: cf.softmax(np.where(mask, x, -np.inf), axis=-1))
    with force_plans(), np.errstate(all="ignore"):
        found = engine.host(fused(engine.array(x), engine.array(mask)))
        expected = fused.__wrapped__(x.astype(np.float64), mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isnan(found[1]).all()


def test_what_is_computed_first(engine: Engine) -> None:
    def modulate(x: Any, c: Any, weight: Any) -> Any:
        scale = (cf.silu(c) @ weight)[:, None, :]
        return (x - x.mean(axis=-1, keepdims=True)) / (1 + x.std(axis=-1, keepdims=True)) * (1 + scale)

    rng = np.random.default_rng(4)
    x, c, weight = normal(rng, (3, 7, 32)), normal(rng, (3, 8)), normal(rng, (8, 32))
    fused = cf.fuse(modulate)
    with force_plans():
        found = engine.host(fused(*engine.arrays([x, c, weight])))
    wide = [a.astype(np.float64) for a in (x, c, weight)]
    np.testing.assert_allclose(found, modulate(*wide), rtol=1e-4, atol=1e-5)


CHEAP: dict[str, tuple[Shape, Shape, str, Callable[[Any, Any], Any]]] = {
    "a scale about 1": (
        (3, 7, 32),
        (3, 32),
        "float32",
        lambda x, m: (x - x.mean(-1, keepdims=True)) * (1 + m[:, None]),
    ),
    "a mask of zeros": ((3, 2, 5, 16), (3, 1, 1, 16), "float32", lambda x, m: cf.softmax(x + (1 - m) * -9, axis=-1)),
    "no mask": ((3, 2, 5, 16), (3, 1, 5, 16), "bool", lambda x, m: cf.softmax(np.where(~m, x, -9), axis=-1)),
    "numbers of tokens": (
        (3, 2, 5, 16),
        (3, 1, 1, 16),
        "int64",
        lambda x, m: cf.softmax(np.where(m > 0, x, -9), axis=-1),
    ),
    "heads": ((3, 7, 32), (3, 32), "float32", lambda x, m: cf.softmax((x * m[:, None]).reshape(3, 7, 2, 16), axis=-1)),
    "heads with positions": (
        (3, 7, 32),
        (7, 32),
        "float32",
        lambda x, m: cf.softmax((x + m).reshape(3, 7, 2, 16), axis=-1),
    ),
    "positions": ((3, 7, 32), (7, 32), "float32", lambda x, m: cf.softmax(x + 0.5 * m, axis=-1)),
}


@pytest.mark.parametrize("name", CHEAP, ids=as_name)
def test_what_few_operators_compute_is_computed_from_rows_that_come_again(engine: Engine, name: str) -> None:
    shape, other, dtype, program = CHEAP[name]
    rng = np.random.default_rng(7)
    plan = check(engine, program, normal(rng, shape), (normal(rng, other) * 2).astype(dtype))
    assert len(plan.steps) == 1


def test_what_several_arrays_make_is_stored(engine: Engine) -> None:
    rng = np.random.default_rng(8)
    fused = cf.fuse(lambda x, a, b: cf.softmax(x + (a * b)[:, None], axis=-1))
    x, a, b = normal(rng, (3, 7, 16)), normal(rng, (3, 16)), normal(rng, (3, 16))
    arguments = engine.arrays([x, a, b])
    with force_plans():
        found = engine.host(fused(*arguments))
        assert len(fused.plan(*arguments).steps) == 2
    np.testing.assert_allclose(found, fused.__wrapped__(*(v.astype(np.float64) for v in (x, a, b))), rtol=1e-5)


def test_an_argument_is_changed_behind_all_who_read_its_rows(engine: Engine) -> None:
    def step(x: Any, m: Any) -> Any:
        y = x * m
        m += y.sum(axis=1, keepdims=True)
        return y

    rng = np.random.default_rng(5)
    x, m = normal(rng, (3, 7, 16)), normal(rng, (3, 1, 16))
    given = engine.array(m)
    with force_plans():
        y = engine.host(cf.fuse(step)(engine.array(x), given))
    expected = m.copy()
    np.testing.assert_allclose(y, step(x, expected), rtol=1e-5)
    np.testing.assert_allclose(engine.host(given), expected, rtol=1e-5, atol=1e-5)


def test_products_keep_their_copies(engine: Engine) -> None:
    def head(x: Any, weight: Any, m: Any) -> Any:
        return cf.gelu((x @ weight).reshape(3, 7, 16) + m)

    rng = np.random.default_rng(6)
    x, weight, m = normal(rng, (21, 32)), normal(rng, (32, 16)), normal(rng, (3, 1, 16))
    with force_plans():
        found = engine.host(cf.fuse(head)(*engine.arrays([x, weight, m])))
    np.testing.assert_allclose(found, head(*(a.astype(np.float64) for a in (x, weight, m))), rtol=1e-4, atol=1e-5)
    assert dtype_of("float32") == found.dtype


JOINED: dict[str, tuple[Callable[..., Any], int, tuple[int, int]]] = {
    "elements alone": (lambda x, m: np.maximum(x, m) * m - 1, 1, (3, 80)),
    "several results": (lambda x, m: (x + m, np.exp(x) * m), 1, (3, 80)),
    "before a product": (lambda x, m: (x * 2 + m) @ np.ones((16, 3), np.float32), 2, (3, 80)),
    "of another reader, too": (lambda x, m: (x + m, cf.softmax(x + m, axis=-1)), 1, (15, 16)),
    "beside values of columns": (lambda x, m: (x + m) * np.arange(16, dtype=np.float32), 1, (15, 16)),
}


@pytest.mark.parametrize("name", JOINED, ids=as_name)
def test_rows_are_joined_where_nothing_is_reduced(engine: Engine, name: str) -> None:
    """Kernels load values of columns once for several rows, of which positions are one."""
    program, launches, domain = JOINED[name]
    rng = np.random.default_rng(7)
    plan = check(engine, program, normal(rng, (3, 5, 16)), normal(rng, (5, 16)))
    assert (plan.launches, plan.steps[0].domain) == (launches, domain)
    for layout in ("row_gap", "fortran", "reversed"):
        check(engine, program, normal(rng, (3, 5, 16)), normal(rng, (5, 16)), layout)


def test_rows_of_several_rounds_are_not_joined(engine: Engine) -> None:
    """Rows of one operand come again within those of another."""

    def program(x: Any, m: Any, n: Any) -> Any:
        return np.minimum(n, m / (1 + np.abs(x)))

    rng = np.random.default_rng(9)
    arguments = [normal(rng, shape) for shape in ((2, 2, 5, 4), (5, 4), (2, 5, 4))]
    fused = cf.fuse(program)
    with force_plans():
        found = engine.host(fused(*engine.arrays(arguments)))
    np.testing.assert_allclose(found, program(*arguments), rtol=1e-6)
    assert fused.plan(*engine.arrays(arguments)).launches == 1


def test_arguments_that_are_changed_are_not_joined(engine: Engine) -> None:
    def step(x: Any, m: Any) -> None:
        x += m

    rng = np.random.default_rng(8)
    x, m = normal(rng, (3, 5, 16)), normal(rng, (5, 16))
    given = engine.array(x)
    with force_plans():
        cf.fuse(step)(given, engine.array(m))
    np.testing.assert_array_equal(engine.host(given), x + m)


def test_rows_that_come_again_alike_are_found_once() -> None:
    """A kernel takes how they do, and computes their index, for the first of their arrays; for others if it differs."""
    x, of_image, of_head = (cf.spec(shape, "float32") for shape in ((3, 2, 5, 16), (3, 1, 5, 16), (2, 1, 16)))
    alike = cf.fuse(lambda x, a, b: cf.softmax(x * a + b, axis=-1)).plan(x, of_image, of_image).source()
    others = cf.fuse(lambda x, a, b: cf.softmax(x * a + b, axis=-1)).plan(x, of_image, of_head).source()
    assert [text.count("Divisor ") for text in (alike, others)] == [3, 6]
    assert "in_a_view_block" in alike and "in_b_view_block" not in alike
