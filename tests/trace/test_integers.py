"""Arithmetic on the bits and quotients of integers in fused functions: NumPy's values and dtypes, in one kernel."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import HOST, NUMPY, Engine, assert_equal
from user_programs import hash_router

import cupyfuse as cf
from cupyfuse.ir.operators import POINTWISE
from cupyfuse.settings import force_plans

Function = Callable[..., Any]
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
ENGINES = pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])


def plain(function: Function, *arguments: Any) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def check(function: Function, arguments: list[Any], engine: Engine, kinds: tuple[str, ...] = ("RowProgram",)) -> None:
    """The results are NumPy's to the bit and of its dtypes, from a plan of these steps."""
    expected = plain(function, *arguments)
    fused = cf.fuse(function)
    with engine.active(), force_plans():
        assert {step.kind for step in fused.plan(*arguments).steps} == set(kinds)
        actual = engine.host(fused(*engine.arrays(arguments)))
    for got, wanted in zip(actual, expected, strict=True):
        assert_equal(np.asarray(got), np.asarray(wanted))


def every(a: Any, b: Any) -> tuple[Any, ...]:
    """Every operator whose result of integers is one, by Python's symbol where there is one."""
    return (
        a & b, a | b, a ^ b, ~a, a << b, a >> b, a // b, a % b, *divmod(a, b), np.fmod(a, b),
        a + b, a - b, a * b, -a, np.square(a), np.maximum(a, b), np.minimum(a, b),
    )  # fmt: skip


def awkward(dtype: str, rng: np.random.Generator, size: int = 40) -> np.ndarray[Any, Any]:
    """Both ends of the range, widths of dtypes and their neighbours, powers of two, and numbers of all sizes."""
    limits = np.iinfo(dtype)
    special = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256]
    special += [-s for s in special] + [limits.min + k for k in range(3)] + [limits.max - k for k in range(3)]
    drawn = rng.integers(limits.min, limits.max, size, dtype, endpoint=True) >> rng.integers(
        0, limits.bits, size, dtype
    )
    return np.concatenate([np.array([s for s in special if limits.min <= s <= limits.max], dtype), drawn])


def pairs(a: Any, b: Any) -> list[Any]:
    return [np.repeat(a[:, None], len(b), axis=1), np.repeat(b[None, :], len(a), axis=0)]


def test_every_operator_on_integers_is_here() -> None:
    names = {name for name, row in POINTWISE.items() if row.gives_integers}
    here = "bitwise_and bitwise_or bitwise_xor invert left_shift right_shift floor_divide remainder fmod add subtract"
    elsewhere = {"clip", "hardtanh", "where"}  # functions of NumPy or of this package
    assert names == {*here.split(), "multiply", "negative", "square", "maximum", "minimum"} | elsewhere


@ENGINES
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_all_pairs_of_bytes(dtype: str, engine: Engine) -> None:
    a = np.arange(256).astype(dtype)
    check(every, pairs(a, a), engine)


@ENGINES
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers(dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    check(every, pairs(awkward(dtype, rng), awkward(dtype, rng)), engine)


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("right", [*DTYPES, "bool"])
@pytest.mark.parametrize("left", ["int8", "uint8", "int64", "uint32"])
def test_two_dtypes_promote(left: str, right: str, engine: Engine, rng: np.random.Generator) -> None:
    a = awkward(left, rng, 9)
    b = awkward(right, rng, 9) if right != "bool" else np.array([False, True])

    def both(a: Any, b: Any) -> tuple[Any, ...]:
        return (*every(a, b)[:11], b & a, b | a, b ^ a, b << a, b >> a, b // a, b % a)

    check(both, pairs(a, b), engine)


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("number", [0, 1, 5, -3, -1, 16, 127, 200, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_numbers_are_weak(number: int, dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    """Numbers that the dtype does not hold are errors, as NumPy's are."""
    a = awkward(dtype, rng)[None] if dtype != "bool" else np.array([[False, True]])

    def function(a: Any) -> tuple[Any, ...]:
        found = a & number, number | a, a ^ number, a << number, number << a, a >> number, number >> a
        return (*found, a // number, number // a, a % number, number % a, np.fmod(a, number))

    limits = np.iinfo(dtype if dtype != "bool" else "int64")
    if limits.min <= number <= limits.max:
        check(function, [a], engine)
        return
    for each in (operator.and_, operator.lshift, operator.rshift, operator.floordiv, operator.mod):
        for fails in (lambda a, op=each: op(a, number), lambda a, op=each: op(number, a)):
            with pytest.raises(OverflowError):
                fails(a)
            with engine.active(), pytest.raises(OverflowError, match="out of bounds"):
                cf.fuse(fails)(engine.array(a))


@ENGINES
def test_numbers_with_a_dtype_are_strong(engine: Engine) -> None:
    a = np.arange(-128, 128, dtype=np.int8)[None]

    def function(a: Any) -> tuple[Any, ...]:
        return a & np.int64(300), a // np.int16(-7), np.uint8(200) % a, a << np.uint8(9), a >> np.array(3)

    check(function, [a], engine)


@ENGINES
def test_masks(engine: Engine) -> None:
    """Bits of masks are logic; NumPy divides and shifts masks as int8."""
    a, b = pairs(np.array([False, True]), np.array([False, True]))

    def function(a: Any, b: Any) -> tuple[Any, ...]:
        logic = a & b, a | b, a ^ b, ~a, a & True, False ^ b, np.bitwise_or(a, b), np.invert(b)
        return (*logic, a << b, a >> b, a // b, a % b, np.fmod(a, b), a // True, True << b, a & 3, a << 2)

    check(function, [a, b], engine)


@ENGINES
def test_uint64_is_left_to_library_steps(engine: Engine) -> None:
    a, b = pairs(*[np.array([0, 1, 5, 64, 2**63, 2**64 - 1], np.uint64)] * 2)
    operations: tuple[Function, ...] = (
        lambda a, b: (a & b, ~a, a << b, a >> b, a // (b | 1), a % (b | 1)),
        lambda a, b: (a ^ 7, a >> 63, a // 10, a % 10, 2**64 - 1 & b),
    )
    for function in operations:
        check(function, [a, b], engine, ("Library",))


@ENGINES
def test_in_place(engine: Engine) -> None:
    def function(a: Any, b: Any) -> tuple[Any, ...]:
        c, d = a.copy(), a * 1
        c &= b
        c |= 5
        c ^= a
        c <<= 2
        d >>= 1
        d //= b
        d %= 7
        c[:, ::2] ^= d[:, ::2]
        return c, d

    a = np.arange(-64, 64, dtype=np.int16).reshape(8, 16) * 131
    fused = cf.fuse(function)
    with engine.active(), force_plans():
        actual = engine.host(fused(*engine.arrays([a, a.T.reshape(8, 16) % 9])))
    for got, wanted in zip(actual, plain(function, a, a.T.reshape(8, 16) % 9), strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize(
    "operation", ["a & b", "a | 1", "~a", "a << 1", "1 >> a", "a ^ (a > 0)", "(b > 0) & a", "b & 0.5"]
)
def test_floats_have_no_bits(operation: str) -> None:
    function = eval(f"lambda a, b: {operation}")
    a, b = np.ones((2, 3), np.float32), np.ones((2, 3), np.int32)
    with pytest.raises(TypeError):
        function(a, b)
    with pytest.raises(cf.TraceError, match=r"(bitwise_\w+|invert|\w+_shift) of float(32|64) arrays: it works on int"):
        cf.fuse(function)(a, b)


def test_no_warning_of_a_division_by_zero() -> None:
    a = np.array([[5, -128, 0]], np.int8)
    fused = cf.fuse(lambda a, b: (a // b, a % b))
    with warnings.catch_warnings(), force_plans():
        warnings.simplefilter("error")
        quotient, rest = fused(a, np.array([[0, -1, 0]], np.int8))
    assert (quotient.tolist(), rest.tolist()) == ([[0, -128, 0]], [[0, 0, 0]])


@ENGINES
def test_integers_fuse_with_floats_and_reductions(engine: Engine) -> None:
    def dequantised(packed: Any, scale: Any) -> tuple[Any, ...]:
        low, high = (packed & 15).astype(np.int8) - 8, (packed >> 4).astype(np.int8) - 8
        return low * scale, (high * scale).max(axis=1), np.where(packed % 3 == 0, low, high // 2)

    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    check(dequantised, [packed, np.float32(0.25) * np.arange(1, 17, dtype=np.float32)[:, None]], engine)


def test_a_router_by_hashes_is_one_step() -> None:
    plan = cf.fuse(hash_router).plan(cf.spec((256, 64), "uint8"))
    assert [step.kind for step in plan.steps] == ["RowProgram"]


# Elements that a mask selects ----------------------------------------------------------------------------------------


def _aliased(a: Any, k: Any) -> Any:
    m = a[k]
    n = m
    m //= 2
    m &= 6
    return n.sum()


def _widened(a: Any, k: Any) -> Any:
    m = a[k]
    m += np.uint8(3)
    return m.sum(), (m * 2).sum()


def _in_parts(a: Any, k: Any) -> Any:
    a[k] //= 2
    a[k] |= 1
    a[k] <<= 2
    return a


def _kept_apart(a: Any, k: Any) -> Any:
    m = a[k]
    m *= 2
    a[k] = m
    m += 1
    return a, m.sum()


MASKED: dict[str, Function] = {
    "an alias sees changes": _aliased,
    "changes keep the dtype": _widened,
    "assigned in place": _in_parts,
    "changed after the assignment": _kept_apart,
    "products": lambda a, k: a[k] @ a[k],
    "products of masks": lambda a, k: (a[k] > 1) @ (a[k] > 2),
    "divmod": lambda a, k: [v.sum() for v in (*divmod(a[k], 4), *divmod(100, a[k]), +a[k])],
}


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
@pytest.mark.parametrize("name", MASKED)
def test_masked_elements(name: str, dtype: str, engine: Engine) -> None:
    function, a, k = MASKED[name], np.array([9, 100, 6, 3], dtype), np.array([True, True, False, True])
    expected = function(a.copy(), k)
    with engine.active(), force_plans():
        got = engine.host(cf.fuse(function)(engine.array(a), engine.array(k)))
    for one, other in zip(got, expected, strict=True) if isinstance(expected, (tuple, list)) else [(got, expected)]:
        assert_equal(one, other)


def test_masked_elements_keep_what_their_dtype_holds() -> None:
    def halves(a: Any, k: Any) -> Any:
        a[k] //= 2.5
        return a

    with force_plans(), pytest.raises(TypeError, match=r"in-place change from dtype.'float64'. to dtype.'int8'"):
        cf.fuse(halves)(np.array([9, 100, 6], np.int8), np.ones(3, bool))


@ENGINES
def test_narrow_integers_take_wide_ones_in_place(engine: Engine) -> None:
    """Sums of unsigned integers are of uint64, which kernels do not take: NumPy or CuPy converts them."""

    def added(s: Any) -> Any:
        r = s.copy()
        r |= s.sum(axis=-1, keepdims=True)
        r += s.prod(axis=-1, keepdims=True)
        q = s.copy()
        q[...] = s.sum(axis=-1, keepdims=True)
        return r, q

    s = np.array([[3, 5], [7, 250]], np.uint8)
    with engine.active(), force_plans():
        got = engine.host(cf.fuse(added)(engine.array(s)))
    for one, other in zip(got, added(s), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("power", [lambda a: a**2, lambda a: np.power(a, 2), lambda a: a**3, lambda a: np.square(a)])
def test_powers_of_masks(power: Callable[[Any], Any], engine: Engine) -> None:
    """NumPy squares in int8 where an operator does it, and in int64 where a function of two arguments does."""
    mask = np.array([[True, False, True]])
    found = engine.host(cf.fuse(power)(engine.array(mask)))
    assert found.dtype == power(mask).dtype
    np.testing.assert_array_equal(found, power(mask))


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("left", ["bool", *DTYPES])
@pytest.mark.parametrize("right", ["bool", "int8", "uint16", "int64"])
def test_products_of_vectors_and_steps_have_numpys_dtypes(left: str, right: str, engine: Engine) -> None:
    """Sums of products wrap around in the dtype of the products, and of bools are whether any is true."""
    a = np.array([[100, 3, 0, 7], [90, 90, 90, 90]]).astype(left)
    b = np.array([[99, 2, 1, 0], [0, 0, 0, 0]]).astype(right)

    def function(a: Any, b: Any) -> Any:
        return np.vecdot(a, b), np.vecdot(a, b, axis=0), np.heaviside(a, b), np.heaviside(a, 2)

    fused = cf.fuse(function)
    with engine.active(), force_plans():
        engine.prepare([lambda: fused(*engine.arrays((a, b)))])
        actual = engine.host(fused(*engine.arrays((a, b))))
    for got, wanted in zip(actual, function(a, b), strict=True):
        assert_equal(np.asarray(got), np.asarray(wanted))


def test_products_of_vectors_have_one_length() -> None:
    for shapes in (((3, 4), (3, 1)), ((3, 4), (3,)), ((4,), ())):
        a, b = np.ones(shapes[0]), np.ones(shapes[1])
        with pytest.raises(ValueError):
            np.vecdot(a, b)
        with pytest.raises(ValueError, match="vecdot: expected last dimensions of one length"):
            cf.fuse(lambda a, b: np.vecdot(a, b))(a, b)
