"""Random chains drawn from the whole language: fused = float64 within derived bounds, in every dtype and layout.

`CUPYFUSE_EXAMPLES=100000 python -m pytest tests/numerics/test_properties.py` draws more chains,
others in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import bounds
import hypothesis.strategies as st
import numpy as np
import pytest
from chains import SIZES, Chain, chains
from searched import EXAMPLES, searched
from support import CUDA, FLOATS, HOST, LAYOUTS, NUMPY, Engine, dtype_of, lay_out

import cupyfuse as cf

SHARE = EXAMPLES // 5  # of a variation on the main property
PARTS, FEWER_PARTS = 16, 4  # in which examples are drawn, for several processes to take


@pytest.fixture(params=[pytest.param(NUMPY, id="numpy"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engines that take a chain as it comes; on the host, kernels of many chains are compiled together."""
    request.param.require()
    yield request.param


# How each argument lies in memory.
SOME_LAYOUTS = st.lists(st.sampled_from(LAYOUTS), min_size=6, max_size=6)


def laid_out(engine: Engine, chain: Chain, layouts: Sequence[str]) -> list[Any]:
    return [lay_out(engine.xp, a, layout) for a, layout in zip(chain.arrays, layouts, strict=False)]


def fused_is_the_chain(engine: Engine, chain: Chain, layouts: Sequence[str]) -> None:
    arguments = laid_out(engine, chain, layouts)
    results = cf.fuse(chain.function)(*arguments)
    chain.check(engine.host(results), engine.host(arguments))


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(PARTS))
def test_a_fused_chain_is_the_chain(engine: Engine, part: int) -> None:
    @searched(part, EXAMPLES // PARTS, chain=chains(FLOATS), layouts=SOME_LAYOUTS)
    def check(chain: Chain, layouts: Sequence[str]) -> None:
        fused_is_the_chain(engine, chain, layouts)

    check()


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_emitted_kernels_are_the_chain(part: int) -> None:
    """The kernels of random chains, run on the CPU; those of all chains are compiled together."""
    examples: list[tuple[Chain, Sequence[str]]] = []
    count = EXAMPLES // 4 // FEWER_PARTS
    kinds = st.one_of(chains(FLOATS), chains(FLOATS, mixed=True), chains(FLOATS, sizes=(0, 1, 2, 5)))

    @searched(part, count, chain=kinds, layouts=SOME_LAYOUTS)
    def collect(chain: Chain, layouts: Sequence[str]) -> None:
        examples.append((chain, layouts))

    collect()
    with HOST.active():
        before = len(HOST.runtime.launched)
        with HOST.runtime.only_collecting():
            for chain, layouts in examples:
                cf.fuse(chain.function)(*laid_out(HOST, chain, layouts))
        for chain, layouts in examples:
            try:
                fused_is_the_chain(HOST, chain, layouts)
            except AssertionError as error:
                raise AssertionError(f"{error}\n\nlayouts {layouts}:\n{chain!r}") from error
        assert len(HOST.runtime.launched) - before >= 0.4 * count, "distinct programs"


def compared(engine: Engine, chain: Chain) -> None:
    arguments = engine.arrays(chain.arrays)
    chain.check(engine.host(cf.fuse(chain.function)(*arguments)), engine.host(arguments))


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_mixed_dtypes_promote_as_numpy_does(engine: Engine, part: int) -> None:
    @searched(part, SHARE // FEWER_PARTS, chain=chains(FLOATS, mixed=True))
    def check(chain: Chain) -> None:
        compared(engine, chain)

    check()


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_empty_arrays(engine: Engine, part: int) -> None:
    @searched(part, SHARE // FEWER_PARTS, chain=chains(FLOATS, sizes=(0, 1, 2, 5)))
    def check(chain: Chain) -> None:
        compared(engine, chain)

    check()


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_bound_arguments_change_nothing(engine: Engine, part: int) -> None:
    @searched(part, SHARE // FEWER_PARTS, chain=chains(FLOATS), which=st.integers(0, 63))
    def check(chain: Chain, which: int) -> None:
        arguments = dict(zip(chain.names, engine.arrays(chain.arrays), strict=True))
        fixed = {name: a for k, (name, a) in enumerate(arguments.items()) if which >> k & 1}
        serve = cf.fuse(chain.function).bind(**fixed)
        results = serve(**{name: a for name, a in arguments.items() if name not in fixed})
        chain.check(engine.host(results), engine.host(list(arguments.values())))

    check()


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_results_go_where_they_are_asked_to(engine: Engine, part: int) -> None:
    """`out=` arrays in any layout, and the arguments themselves."""

    @searched(
        part,
        SHARE // FEWER_PARTS,
        chain=chains(FLOATS, sizes=(1, 2, 5, 7)),
        layout=st.sampled_from(LAYOUTS),
        data=st.data(),
    )
    def check(chain: Chain, layout: str, data: st.DataObject) -> None:
        arguments = engine.arrays(chain.arrays)
        out = []
        for value in chain.expected:
            like = np.zeros(value.shape, np.bool_ if value.dtype == "bool" else dtype_of(value.dtype))
            fitting = [a for i, a in enumerate(arguments) if (a.shape, a.dtype) == (like.shape, like.dtype)]
            fitting = [a for i, a in enumerate(fitting) if i not in chain.changed and all(a is not o for o in out)]
            if fitting and not chain.changed and data.draw(st.booleans()):
                out.append(data.draw(st.sampled_from(fitting)))
            else:
                out.append(lay_out(engine.xp, like, layout))
        results = cf.fuse(chain.function)(*arguments, out=tuple(out))
        assert all(a is b for a, b in zip(results, out, strict=True))
        chain.check(engine.host(results))

    check()


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(FEWER_PARTS))
def test_the_bounds_hold_for_plain_numpy(part: int) -> None:
    """The reference itself: NumPy's own evaluation of the same text stays within the bounds."""

    @searched(part, SHARE // FEWER_PARTS, chain=chains(("float32", "float64"), sizes=SIZES))
    def check(chain: Chain) -> None:
        arguments = [a.copy() for a in chain.arrays]
        with np.errstate(all="ignore"):
            results = chain.function(*arguments)
        chain.check(results, arguments)

    check()


def test_the_bounds_leave_open_which_power_is_one() -> None:
    """NaN to a power that rounds to 0 is 1, and a base that rounds to 1 to the power of NaN."""
    small = bounds.cast(bounds.exact(np.float32(1e-9), "float32"), "float16")
    near = bounds.cast(bounds.exact(np.float32(1 + 1e-5), "float32"), "float16")
    nan = bounds.exact(np.float16(np.nan), "float16")
    assert np.isinf(bounds.pointwise("power", nan, small, dtype="float16").e)
    assert np.isinf(bounds.pointwise("power", near, nan, dtype="float16").e)
    assert bounds.pointwise("power", nan, near, dtype="float16").e == 0
