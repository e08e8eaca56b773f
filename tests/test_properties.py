"""Random chains drawn from the whole language: fused = float64 within derived bounds, in every dtype and layout.

`CUPYFUSE_EXAMPLES=100000 python -m pytest tests/test_properties.py` looks further, at other chains in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from chains import SIZES, Chain, chains
from hypothesis import Phase, given, seed, settings
from support import CUDA, FLOATS, HOST, LAYOUTS, NUMPY, Engine, dtype_of, lay_out

import cupyfuse as cf

SHARE = settings().max_examples // 5
ON_THE_HOST = settings().max_examples // 4


@pytest.fixture(params=[pytest.param(NUMPY, id="numpy"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engines that take a chain as it comes; on the host, kernels of many chains are compiled together."""
    request.param.require()
    yield request.param


def few(test: Callable[..., Any]) -> Callable[..., Any]:
    """A variation on the main property gets a fifth of its examples."""
    return settings(max_examples=SHARE)(test)


# How each argument lies in memory.
SOME_LAYOUTS = st.lists(st.sampled_from(LAYOUTS), min_size=6, max_size=6)


def laid_out(engine: Engine, chain: Chain, layouts: Sequence[str]) -> list[Any]:
    return [lay_out(engine.xp, a, layout) for a, layout in zip(chain.arrays, layouts, strict=False)]


def fused_is_the_chain(engine: Engine, chain: Chain, layouts: Sequence[str]) -> None:
    arguments = laid_out(engine, chain, layouts)
    results = cf.fuse(chain.function)(*arguments)
    chain.check(engine.host(results), engine.host(arguments))


@given(chain=chains(FLOATS), layouts=SOME_LAYOUTS)
def test_a_fused_chain_is_the_chain(engine: Engine, chain: Chain, layouts: Sequence[str]) -> None:
    fused_is_the_chain(engine, chain, layouts)


def test_emitted_kernels_are_the_chain() -> None:
    """The kernels of random chains, run on the CPU."""
    number = 0 if settings().derandomize else random.randrange(2**32)
    examples: list[tuple[Chain, Sequence[str]]] = []

    @seed(number)
    @settings(max_examples=ON_THE_HOST, phases=[Phase.generate], derandomize=False, database=None)
    @given(st.one_of(chains(FLOATS), chains(FLOATS, mixed=True), chains(FLOATS, sizes=(0, 1, 2, 5))), SOME_LAYOUTS)
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
                raise AssertionError(f"{error}\n\nof seed {number}, layouts {layouts}:\n{chain!r}") from error
        assert len(HOST.runtime.launched) - before >= 0.4 * ON_THE_HOST, "distinct programs"


@few
@given(chain=chains(FLOATS, mixed=True))
def test_mixed_dtypes_promote_as_numpy_does(engine: Engine, chain: Chain) -> None:
    arguments = engine.arrays(chain.arrays)
    chain.check(engine.host(cf.fuse(chain.function)(*arguments)), engine.host(arguments))


@few
@given(chain=chains(FLOATS, sizes=(0, 1, 2, 5)))
def test_empty_arrays(engine: Engine, chain: Chain) -> None:
    arguments = engine.arrays(chain.arrays)
    chain.check(engine.host(cf.fuse(chain.function)(*arguments)), engine.host(arguments))


@few
@given(chain=chains(FLOATS), which=st.integers(0, 63))
def test_bound_arguments_change_nothing(engine: Engine, chain: Chain, which: int) -> None:
    arguments = dict(zip(chain.names, engine.arrays(chain.arrays), strict=True))
    fixed = {name: a for k, (name, a) in enumerate(arguments.items()) if which >> k & 1}
    serve = cf.fuse(chain.function).bind(**fixed)
    results = serve(**{name: a for name, a in arguments.items() if name not in fixed})
    chain.check(engine.host(results), engine.host(list(arguments.values())))


@few
@given(chain=chains(FLOATS, sizes=(1, 2, 5, 7)), layout=st.sampled_from(LAYOUTS), data=st.data())
def test_results_go_where_they_are_asked_to(engine: Engine, chain: Chain, layout: str, data: st.DataObject) -> None:
    """`out=` arrays in any layout, and the arguments themselves."""
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


@few
@given(chain=chains(("float32", "float64"), sizes=SIZES))
def test_the_bounds_hold_for_plain_numpy(chain: Chain) -> None:
    """The reference itself: NumPy's own evaluation of the same text stays within the bounds."""
    arguments = [a.copy() for a in chain.arrays]
    with np.errstate(all="ignore"):
        results = chain.function(*arguments)
    chain.check(results, arguments)
