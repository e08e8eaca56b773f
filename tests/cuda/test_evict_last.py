"""Rows that are loaded so that the L2 cache evicts them after what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forced_rows import program_of
from kernel_cases import layer_norm, softmax
from support import CUDA

import cupyfuse as cf
from cupyfuse.cuda.config import Access, Config, accesses
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.sources import emit_kernels


def configured(function: Any, *arrays: Any, clusters: bool = True) -> tuple[Config, str]:
    program = program_of(function, *arrays)
    config = default_config(program, next(accesses(program)), clusters)
    return config, emit_kernels(program, config)[0].source


@pytest.mark.parametrize(
    ("dtype", "cols"), [("float32", 4096), ("bfloat16", 4096), ("bfloat16", 1024), ("float32", 8191)]
)
def test_much_that_is_read_and_written_is_evicted_last(dtype: str, cols: int) -> None:
    """In whole packs; single elements, and what is computed as it was written, are loaded as usual."""
    config, source = configured(softmax, cf.spec(((1 << 28) // cols, cols), dtype))
    assert config.evict_last
    loads = [line for line in source.splitlines() if "void load(" in line]
    assert all("load_evict_last<V>(in_y" in line and "else t.in_y = load_pack<V>(in_y" in line for line in loads)
    again = [line for line in source.splitlines() if "void load_again(" in line]
    assert len(again) == len(loads) == 2
    assert not any("evict_last" in line for line in again)


def test_results_that_the_next_kernel_reads_stay_in_the_cache() -> None:
    """Below 128 MB, read and written."""
    assert configured(softmax, cf.spec((4096, 4096)))[0].evict_last
    config, source = configured(softmax, cf.spec((4095, 4096)))
    assert not config.evict_last
    assert "evict_last" not in source[source.index("struct Program") :]


def test_what_gains_nothing_is_loaded_as_usual() -> None:
    """Reductions, rows that are narrow or computed again, in shared memory or in older GPUs, and packs of 8 bytes."""
    rows = 1 << 17

    def total(y: Any) -> Any:
        return y.sum(axis=1)

    def of_silu(y: Any, a: Any, c: Any) -> Any:
        return layer_norm(cf.silu(y), a, c)

    large = cf.spec((rows, 4096), "bfloat16")
    vector = cf.spec(4096, "bfloat16")
    assert not configured(total, large)[0].evict_last
    assert not configured(softmax, cf.spec((rows * 16, 256), "bfloat16"))[0].evict_last
    assert not configured(softmax, cf.spec((rows, 4096), "float64"))[0].evict_last
    assert not configured(of_silu, large, vector, vector)[0].evict_last
    assert not configured(softmax, cf.spec((rows, 49152), "bfloat16"))[0].evict_last
    assert configured(softmax, cf.spec((rows, 65536), "bfloat16"))[0].evict_last
    assert not configured(softmax, large, clusters=False)[0].evict_last
    program = program_of(softmax, large)
    assert default_config(program, Access(8), clusters=True).evict_last
    assert not default_config(program, Access(4), clusters=True).evict_last
    assert not default_config(program, Access(8, True, True), clusters=True).evict_last


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cols", [1024, 1500, 4096, 8191])
def test_results_on_a_gpu(dtype: str, cols: int, rng: np.random.Generator) -> None:
    """Of 160 MB, special values among them, and in place."""
    CUDA.require()
    cupy = CUDA.xp
    rows = (80 << 20) // np.dtype(dtype).itemsize // cols
    y = rng.standard_normal((rows, cols), dtype=np.float32).astype(dtype)
    y[3, 5], y[4, 7], y[5] = np.inf, np.nan, -np.inf
    on_gpu = cupy.asarray(y)
    result = cf.fuse(softmax)(on_gpu)
    few = cf.fuse(softmax)(on_gpu[:64].copy())
    tolerance = {"float16": 2e-3, "float32": 1e-5}[dtype]
    for place in (slice(0, 64), slice(rows - 64, rows)):
        expected = cf.fuse(softmax)(y[place].astype(np.float64))
        np.testing.assert_allclose(cupy.asnumpy(result[place]), expected, rtol=tolerance, atol=tolerance / cols)
    np.testing.assert_allclose(cupy.asnumpy(few), cupy.asnumpy(result[:64]), rtol=tolerance, atol=tolerance / cols)

    def halved(y: Any) -> Any:
        y *= 0.5
        return cf.softmax(y, axis=1)

    again = cf.fuse(halved)(on_gpu)
    np.testing.assert_array_equal(cupy.asnumpy(on_gpu[:64]), y[:64] * np.array(0.5, dtype))
    expected = cf.fuse(softmax)(y[:64].astype(np.float64) * 0.5)
    np.testing.assert_allclose(cupy.asnumpy(again[:64]), expected, rtol=tolerance, atol=tolerance / cols)
