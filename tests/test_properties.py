"""Random chains drawn from the whole language: fused = float64 within derived bounds, in every dtype and layout.

`CUPYFUSE_EXAMPLES=10000 python -m pytest tests/test_properties.py` looks further, at other chains in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
from chains import SIZES, Chain, chains
from hypothesis import given, settings
from support import FLOATS, LAYOUTS, Engine, dtype_of, lay_out

import cupyfuse as cf

SHARE = settings().max_examples // 5


def few(test: Callable[..., Any]) -> Callable[..., Any]:
    """A variation on the main property gets a fifth of its examples."""
    return settings(max_examples=SHARE)(test)


@given(chain=chains(FLOATS), layout=st.sampled_from(LAYOUTS))
def test_a_fused_chain_is_the_chain(engine: Engine, chain: Chain, layout: str) -> None:
    arguments = [lay_out(engine.xp, a, layout) for a in chain.arrays]
    results = cf.fuse(chain.function)(*arguments)
    chain.check(engine.host(results), engine.host(arguments))


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
