"""What `sanitize.py` runs under compute-sanitizer: the kernel cases, each in vectors and one element at a time.

Memory comes straight from cudaMalloc, so that the tools see where an array ends; results go to arrays full of NaN and
gaps between rows hold NaN; and everything is compared with the program as written. Products by cuBLAS are left out;
those from fp16 halves, and 16-bit ones with epilogues, run where there are Hopper's tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kernel_cases import CASES, Arrays, Case
from support import dtype_of, lay_out, normal

import cupyfuse as cf
from cupyfuse import settings
from cupyfuse.plan.schedule import tiles

POISON = 0xFF  # in every byte: NaN in floats of any size


def normalised_by_columns(y: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return cf.softmax(cf.batch_norm(y, mean, var, gamma, beta), axis=1)


@dataclass(frozen=True)
class Guarded(Case):
    """A guard for each element, without a product before it; some factors underflow, and no value as written does."""

    def arguments(self) -> Arrays:
        rng = np.random.default_rng(1)
        y, *columns = (normal(rng, shape, self.dtype) for shape in (self.shape, *[self.shape[1]] * 4))
        columns[1] = np.abs(columns[1]) + dtype_of(self.dtype).type(0.5)
        columns[1][0], columns[2][0] = 1e30, 1e-28
        return [y, *columns]


GUARDED = [
    Guarded(normalised_by_columns, shape, dtype) for shape in ((9, 20), (5, 1100)) for dtype in ("float32", "float64")
]


def uploaded(cupy: Any, values: np.ndarray[Any, Any], layout: str) -> Any:
    """An array on the GPU, laid out as asked for, that only copies from the host have written to."""
    placed = lay_out(np, values, layout)
    whole = placed
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = placed.ctypes.data - whole.ctypes.data
    memory = np.full(max(whole.nbytes, 1), POISON, np.uint8)
    np.ndarray(placed.shape, placed.dtype, memory, start, placed.strides)[...] = values
    there = cupy.ndarray(memory.shape, np.uint8)
    there.set(memory)
    return cupy.ndarray(placed.shape, placed.dtype, there.data + start, strides=placed.strides)


def downloaded(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array.get())


def run(cupy: Any, case: Case) -> int:
    """Run a case into poisoned arrays and compare; returns how many kernels were launched."""
    fused = cf.fuse(case.program)
    arguments = [uploaded(cupy, a, case.layout) for a in case.arguments()]
    plan = fused.plan(*arguments)
    if any(step.kind == "Gemm" for step in plan.steps):
        return 0
    outs = []
    for output in plan.outputs:
        dtype = dtype_of(output.dtype)
        poison = np.full(int(np.prod(output.shape)) * dtype.itemsize, POISON, np.uint8)
        outs.append(uploaded(cupy, poison.view(dtype).reshape(output.shape), "contiguous"))
    fused(*arguments, out=outs)
    case.check(tuple(downloaded(out) for out in outs))
    return int(plan.launches)


def run_products(cupy: Any) -> int:
    """Products from halves, with rows and elements to repair; returns how many kernels were launched."""
    from cupyfuse.cuda.launch import sequence
    from cupyfuse.cuda.runtime import on_device
    from cupyfuse.cuda.split_launch import Split, SplitProduct
    from cupyfuse.cuda.structs import integers, pointer
    from cupyfuse.ir.products import split_shape

    runtime, launches = on_device(0), 0
    if runtime.device is None or not runtime.device.split:
        return 0
    rng = np.random.default_rng(2)
    for m, n, k in ((1, 1, 1), (130, 9, 129), (65, 170, 200), (40, 700, 64)):
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
        a[m // 2, 0], a[0, k // 2], b[n - 1, k - 1] = np.inf, 1e-30, 1e20
        operands = [uploaded(cupy, x, "contiguous") for x in (a, b)]
        halves = [uploaded(cupy, np.full(split_shape(x.shape), np.nan, np.float16), "contiguous") for x in (a, b)]
        result = uploaded(cupy, np.full((m, n), np.nan, np.float32), "contiguous")
        for x, split in zip(operands, halves, strict=True):
            launch = Split(*x.shape, (x.shape[1], 1)).launch(runtime, 0, 1)
            sequence([launch])([x.data.ptr, split.data.ptr], runtime.stream())
        product = SplitProduct((m, n, k), (k, 1), (k, 1), runtime.processors, vec=2 if n % 2 == 0 else 1)
        workspace = runtime.workspace(product.workspace)
        launch = product.launch(runtime, (0, 1), (pointer(2), pointer(3)), 4, pointer(5) + integers(n))
        addresses = [*(array.data.ptr for array in (*halves, *operands)), workspace.ptr, result.data.ptr]
        sequence([launch])(addresses, runtime.stream())
        with np.errstate(all="ignore"):
            expected = a.astype(np.float64) @ b.astype(np.float64).T
        scale = np.abs(np.nan_to_num(a, posinf=0)) @ np.abs(b).T
        actual = downloaded(result)
        special = ~np.isfinite(expected)
        assert (np.isnan(actual[special]) == np.isnan(expected[special])).all(), (m, n, k)
        assert (np.abs(actual[~special] - expected[~special]) <= 1e-6 * scale[~special]).all(), (m, n, k)
        launches += 4
    return launches


def run_epilogues(cupy: Any) -> int:
    """16-bit products with row programs as epilogues, in every cut; returns how many kernels were launched."""
    from cupyfuse.cuda.runtime import on_device

    device = on_device(0).device
    if device is None or not device.has_warpgroups:
        return 0
    rng, launches, chosen = np.random.default_rng(3), 0, tiles._TILES
    tails = (lambda x, w, b: cf.gelu(x @ w.T + b), lambda x, w, b: cf.logsumexp(x @ w.T + b, axis=1))
    for cut in chosen:
        tiles._TILES = (cut,)
        for m, n, k in ((1, 3, 8), (300, 520, 200), (130, 263, 72)):
            x, w, b = normal(rng, (m, k), "bfloat16"), normal(rng, (n, k), "bfloat16"), normal(rng, (n,), "bfloat16")
            wide = [a.astype(np.float64) for a in (x, w, b)]
            for tail in tails:
                expected = tail(*wide)
                # That a result is written shows in its values: initcheck does not see what the copy engine stores.
                result = uploaded(cupy, np.full(expected.shape, np.nan, x.dtype), "contiguous")
                with settings.epilogues("always"):
                    fused = cf.fuse(tail)
                    fused(*(uploaded(cupy, a, "contiguous") for a in (x, w, b)), out=result)
                assert fused.plans[-1].steps[0].epilogue is not None
                found = downloaded(result).astype(np.float64)
                np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * k**0.5)
                launches += fused.plans[-1].launches
    tiles._TILES = chosen
    return launches


def main() -> None:
    import cupy

    cupy.cuda.set_allocator(None)
    # One element off, no pointer is aligned for vectors.
    scalar = [replace(case, layout="offset") for case in CASES if case.layout == "contiguous"]
    launches = [run(cupy, case) for case in (*CASES, *scalar, *GUARDED)]
    products, epilogues = run_products(cupy), run_epilogues(cupy)
    cupy.cuda.Device().synchronize()
    cases = sum(count > 0 for count in launches)
    print(f"{cases} cases, {sum(launches)} launches, {len(launches) - cases} cases with cuBLAS's products left out")
    print(f"{products} launches for products from halves, {epilogues} for 16-bit products with epilogues")
    assert sum(launches) >= 200, "too few launches for a check of all kernels"


if __name__ == "__main__":
    main()
