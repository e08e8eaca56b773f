"""Random chains drawn from the whole language: fused = float64 within derived bounds, in every dtype and layout."""

from __future__ import annotations

import bounds
import hypothesis.strategies as st
import numpy as np
from chains import Chain, chains
from hypothesis import given
from support import LAYOUTS, Engine, lay_out

import cupyfuse as cf


@given(chain=chains(("float32", "float64", "float16", "bfloat16")), layout=st.sampled_from(LAYOUTS))
def test_a_fused_chain_is_the_chain(engine: Engine, chain: Chain, layout: str) -> None:
    arguments = [lay_out(engine.xp, a, layout) for a in chain.arrays]
    results = engine.host(cf.fuse(chain.function)(*arguments))
    for name, result, value in zip(chain.outputs, results, chain.expected, strict=True):
        bounds.check(np.asarray(result), value, f"v{name}")


@given(chain=chains(("float32", "float64")))
def test_the_bounds_hold_for_plain_numpy(chain: Chain) -> None:
    """The reference itself: NumPy's own evaluation of the same text stays within the bounds."""
    with np.errstate(all="ignore"):
        results = chain.function(*chain.arrays)
    for name, result, value in zip(chain.outputs, results, chain.expected, strict=True):
        bounds.check(np.asarray(result), value, f"v{name}")
