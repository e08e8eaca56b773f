"""Helpers of the example scripts: the array library, checks against float64, a timer, a plot."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
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
    """Convert arrays by name to float64."""
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check_accuracy(fused: Any, unfused: Any, exact: Any) -> None:
    """Exit if the fused result is less accurate than the unfused one, beyond 8 roundings for the order of sums."""
    errors = [float(abs(result.astype(np.float64) - exact).max()) for result in (fused, unfused)]
    roundings = 8 * float(np.finfo(fused.dtype).eps) / 2 * float(abs(exact).max())
    print(f"largest error against float64: {errors[0]:.2g} fused, {errors[1]:.2g} unfused")
    if not errors[0] <= errors[1] + roundings:
        raise SystemExit("the fused result is less accurate than the unfused one")


def compare_times(fused: Callable[[], Any], unfused: Callable[[], Any], xp: Any) -> None:
    """Print the median time of five calls of both functions, measured in turn."""
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for function, seconds in zip((fused, unfused), times, strict=True):
            _synchronize(xp)
            start = time.perf_counter()
            function()
            _synchronize(xp)
            seconds.append(time.perf_counter() - start)
    a, b = (statistics.median(seconds) * 1e3 for seconds in times)
    place = "the CPU" if xp is np else "the GPU"
    print(f"time of a call on {place}: {a:.3g} ms fused, {b:.3g} ms unfused: {b / a:.2f} times faster")


def _synchronize(xp: Any) -> None:
    # Launches are asynchronous.
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


# Dask's workers import these two: functions of a script itself would be pickled for each task.
def draw_rows(on_gpu: bool, seed: int, block_info: Any = None) -> Any:
    """Draw a chunk of rows on the worker, the same ones whenever it is drawn again."""
    here = block_info[None]
    seeds = [seed, here["chunk-location"][0]]
    if on_gpu:
        import cupy

        random = cupy.random.default_rng(seeds)
    else:
        random = np.random.default_rng(seeds)
    return random.standard_normal(here["chunk-shape"], dtype=np.float32)


def largest_of_rows(chunk: Any) -> np.ndarray[Any, Any]:
    """Return the largest element of each row, as a column in the host's memory."""
    largest = chunk.max(axis=1, keepdims=True)
    return largest if isinstance(largest, np.ndarray) else largest.get()


def compare_losses(unfused: Sequence[float], fused: Sequence[float], exact: Sequence[float]) -> None:
    """Print the losses of float32 trainings beside those in float64; exit if the fused one is further off.

    Both differ from float64 by rounding errors that grow with every step: their sizes agree over the whole training,
    not step by step. A loss is a rounded mean, which allows a few units in the last place more.
    """
    steps = len(exact)
    print(f"{'step':>6} {'loss, plain':>14} {'loss, fused':>14} {'loss, float64':>14}")
    for step in [*range(0, steps, max(1, steps // 10)), steps - 1]:
        print(f"{step:>6} {unfused[step]:>14.7f} {fused[step]:>14.7f} {exact[step]:>14.7f}")
    distances = [max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (unfused, fused)]
    allowed = 4 * distances[0] + 8 * float(np.finfo(np.float32).eps) * max(exact)
    print(f"\nlargest distance from the float64 losses: {distances[0]:.2g} plain, {distances[1]:.2g} fused", end="")
    print(f" ({allowed:.2g} allowed)")
    if not distances[1] <= allowed:
        raise SystemExit("the fused training is further from float64 than roundings explain")
    if not exact[-1] < 0.8 * exact[0]:
        raise SystemExit("the model has learnt nothing")


def draw_memory(file: str, what: str, numbers: Sequence[int], megabytes: Sequence[Sequence[float]]) -> None:
    """Draw the memory with and without the logits over a number of classes; exit where matplotlib is not installed."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib: {error}") from error
    figure, axes = pyplot.subplots(layout="constrained")
    axes.loglog(numbers, megabytes, base=2, label=("with the logits", "without"), marker="o")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(what)
    axes.set_ylabel("MB beside arguments and results")
    axes.legend()
    figure.savefig(file)
