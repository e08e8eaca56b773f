"""CUDA graphs of CuPy streams: fused calls are captured, products and all, and replayed with other arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import HEADS, Head

import cupyfuse as cf
from cupyfuse.errors import EngineError

cp = pytest.importorskip("cupy", reason="needs a GPU: CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cp.cuda.is_available(), reason="needs a GPU")]


def capture(call: Any) -> tuple[Any, Any]:
    """A graph of the call, and the result that each replay writes."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
    return graph, result


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("shape", [(64, 96, 80), (129, 1000, 300), (512, 2048, 4096)])
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_heads_are_captured_and_replayed(head: Head, shape: tuple[int, int, int], dtype: str, rng: Any) -> None:
    arguments = [cp.asarray(a) for a in head.arguments(rng, *shape, dtype)]
    fused = cf.fuse(head.function)
    graph, result = capture(lambda: fused(*arguments))
    for _ in range(3):
        arguments[0][...] = cp.asarray(rng.standard_normal(arguments[0].shape).astype(dtype))
        taken = [cp.full((1 << 20,), np.nan, np.float32) for _ in range(8)]  # memory that nothing else holds on to
        result[...] = np.nan
        graph.launch(stream=cp.cuda.Stream.null)
        cp.cuda.Device().synchronize()
        assert (result == fused(*arguments)).all()
        del taken


def test_bound_weights_are_captured(rng: Any) -> None:
    x, weight = (cp.asarray(rng.standard_normal(s), np.float32) for s in ((256, 1024), (2048, 1024)))
    serve = cf.fuse(lambda x, weight: cf.logsumexp(x @ weight.T, axis=1)).bind(weight=weight)
    graph, result = capture(lambda: serve(x))
    x *= 2
    graph.launch(stream=cp.cuda.Stream.null)
    assert (result == serve(x)).all()


def test_blocks_and_copies_are_captured(rng: Any) -> None:
    """What lives between the steps of a call belongs to the graph: halves for all blocks, results on their way."""
    x, weight = (cp.asarray(rng.standard_normal(s), np.float32) for s in ((600, 1024), (2048, 1024)))
    blocks = cf.fuse(lambda x, weight: cf.softmax(x @ weight.T, axis=1), max_workspace=2 << 20)
    transposed = cf.fuse(lambda x, weight: (cf.softmax(x @ weight.T, axis=1) * 2).T)
    out = cp.empty((2048, 600), np.float32)
    assert blocks.plan(x, weight).blocks is not None
    for call, result in ((lambda: blocks(x, weight), None), (lambda: transposed(x, weight, out=out), out)):
        graph, captured = capture(call)
        x[...] = cp.asarray(rng.standard_normal(x.shape), np.float32)
        taken = [cp.full((1 << 20,), np.nan, np.float32) for _ in range(16)]
        graph.launch(stream=cp.cuda.Stream.null)
        cp.cuda.Device().synchronize()
        got = (captured if result is None else result).copy()
        assert (got == call()).all()
        del taken


def test_a_first_call_within_a_capture_says_what_to_do(rng: Any) -> None:
    fused = cf.fuse(lambda x: cf.softmax(x * 0.123456789, axis=1))
    x = cp.asarray(rng.standard_normal((5, 7)), np.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(EngineError, match="before the capture begins"):
                fused(x)
        finally:
            stream.end_capture()
    assert fused(x).shape == (5, 7)
