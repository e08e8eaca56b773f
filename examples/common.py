"""Helpers of the example scripts: the array library, a check against float64, a timer."""

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
    """Return CuPy if there is a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


def shape_from_command_line(description: str | None) -> tuple[int, int, int]:
    """Parse the command line: rows, in_features and out_features, those of the benchmarks with --full."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"run at {FULL} instead of {SMALL}")
    return FULL if parser.parse_args().full else SMALL


def in_float64(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check(fused: Any, unfused: Any, exact: Any) -> None:
    """Exit if the fused result is less accurate than the unfused one, beyond 8 roundings for the order of sums."""
    errors = [float(abs(result.astype(np.float64) - exact).max()) for result in (fused, unfused)]
    roundings = 8 * float(np.finfo(fused.dtype).eps) / 2 * float(abs(exact).max())
    print(f"largest error against float64: {errors[0]:.2g} fused, {errors[1]:.2g} unfused")
    if not errors[0] <= errors[1] + roundings:
        raise SystemExit("the fused result is less accurate than the unfused one")


def compare(fused: Callable[[], Any], unfused: Callable[[], Any], xp: Any) -> None:
    """Print the median time of both, measured in turn."""
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for function, seconds in zip((fused, unfused), times, strict=True):
            _wait(xp)
            start = time.perf_counter()
            function()
            _wait(xp)
            seconds.append(time.perf_counter() - start)
    a, b = (statistics.median(seconds) * 1e3 for seconds in times)
    place = "the CPU" if xp is np else "the GPU"
    print(f"time of a call on {place}: {a:.3g} ms fused, {b:.3g} ms unfused: {b / a:.2f} times faster")


def _wait(xp: Any) -> None:
    # Launches are asynchronous.
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
