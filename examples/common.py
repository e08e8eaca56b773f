"""What the example scripts share: which array library to use, a check against float64, a stopwatch."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SMALL = (256, 1024, 1024)
FULL = (1024, 8192, 8192)


def array_module() -> Any:
    """CuPy where there is a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


def shape_from_command_line(description: str | None) -> tuple[int, int, int]:
    """Rows, in_features and out_features: small ones, or with --full those of the benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"run at {FULL} instead of {SMALL}")
    return FULL if parser.parse_args().full else SMALL


def in_float64(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check(fused: Any, unfused: Any, exact: Any) -> None:
    """Fail where fused work is further from float64 than unfused work is, beyond a few roundings.

    Those are allowed since sums are taken in another order.
    """
    errors = [float(abs(result.astype(np.float64) - exact).max()) for result in (fused, unfused)]
    roundings = 8 * float(np.finfo(fused.dtype).eps) / 2 * float(abs(exact).max())
    print(f"largest error against float64: {errors[0]:.2g} fused, {errors[1]:.2g} unfused")
    if not errors[0] <= errors[1] + roundings:
        raise SystemExit("the fused result is less accurate than the unfused one")


def compare(fused: Callable[[], Any], unfused: Callable[[], Any], xp: Any) -> None:
    """Print the median time of both, taken in turn."""
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for function, taken in zip((fused, unfused), times, strict=True):
            _wait(xp)
            begun = time.perf_counter()
            function()
            _wait(xp)
            taken.append(time.perf_counter() - begun)
    a, b = (statistics.median(taken) * 1e3 for taken in times)
    place = "the CPU" if xp is np else "the GPU"
    print(f"time of a call on {place}: {a:.3g} ms fused, {b:.3g} ms unfused, {b / a:.2f} times as long")


def _wait(xp: Any) -> None:
    # A launch returns before the GPU has done the work.
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
