"""Softmax and logsumexp over rows of many lengths: memory bandwidth on data that no cache holds."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import dtypes

from . import options as types
from .lab import COMPILED, EAGER, FUSED, Lab, Rival, Unavailable, run
from .report import Case

# What options are where they are not given, in full and quick runs.
DEFAULTS = {
    "budget": (0.15, 0.03),  # GPU seconds for each rival of a case
    "bytes": (1 << 30, 1 << 27),
    "compile_budget": (180.0, 40.0),
    "lengths": (
        (256, 1000, 1024, 4096, 8191, 8192, 16384, 32768, 50257, 65536, 131072, 262144),
        (256, 1000, 8192, 50257, 262144),
    ),
}
_BLOCK = 1 << 24  # elements drawn; the rest of the data are multiples of them
_CHECKED = 1 << 20  # elements compared at the start, in the middle and at the end


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=types.lengths, metavar="N,N,...", help="elements in a row")
    parser.add_argument(
        "--dtypes", type=types.names(types.DTYPES), default=("float32", "bfloat16"), metavar="DTYPE,..."
    )
    full, quick = DEFAULTS["compile_budget"]
    help_text = f"time for torch.compile to compile (default: {full:.0f}, quick {quick:.0f})"
    parser.add_argument("--compile-budget", type=float, metavar="SECONDS", help=help_text)


@cf.fuse
def row_softmax(x: Any) -> Any:
    """Softmax over each row; from (B, N) to (B, N)."""
    return cf.softmax(x, axis=1)


@cf.fuse
def row_logsumexp(x: Any) -> Any:
    """Logsumexp over each row; from (B, N) to (B,)."""
    return cf.logsumexp(x, axis=1)


class CompileBudget:
    """Seconds that may still be spent on torch.compile."""

    def __init__(self, seconds: float):
        self._seconds = self._left = seconds

    def spend(self, work: Callable[[], Any]) -> None:
        """Do some work and count its time; raise `Unavailable` once the time is spent."""
        if self._left <= 0.0:
            raise Unavailable(f"not compiled: the {self._seconds:.0f} s given to torch.compile were spent")
        began = time.perf_counter()
        try:
            work()
        finally:
            self._left -= time.perf_counter() - began


def draw(lab: Lab, dtype: str, count: int, seed: int) -> Any:
    """Draw `count` normal numbers on the GPU: one block of them, repeated with other scales."""
    block = lab.cupy.asarray(np.random.default_rng(seed).standard_normal(min(count, _BLOCK), dtype=np.float32))
    data = lab.cupy.empty(count, dtypes.to_numpy(dtype))
    for number, start in enumerate(range(0, count, _BLOCK)):
        piece = block[: min(_BLOCK, count - start)] * np.float32(1.0 + number / 64)
        data[start : start + _BLOCK] = piece.astype(data.dtype)
    return data


def _factories(lab: Lab, operation: str, x: Any, compile_budget: CompileBudget) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of softmax or logsumexp over the rows of `x`."""
    fused = row_softmax if operation == "softmax" else row_logsumexp
    cupyx = functools.partial(getattr(lab.special, operation), axis=1)
    shape = x.shape if operation == "softmax" else x.shape[:1]
    few = max(1, min(x.shape[0], _CHECKED // x.shape[1]))
    starts = sorted({0, (x.shape[0] - few) // 2, x.shape[0] - few})

    def sample(result: Any, double: Callable[[Any], Any]) -> list[Any]:
        return [lab.cupy.concatenate([double(result[start : start + few]) for start in starts])]

    expected = sample(x, lambda rows: cupyx(lab.as_double(rows)))

    def torch(compiling: bool) -> Rival:
        rivals = lab.need_torch(compiling)
        function = getattr(rivals, operation)
        call = functools.partial(rivals.compile_static(function) if compiling else function, rivals.as_tensor(x))
        if compiling:
            compile_budget.spend(call)
        return lab.rival(call, expected, int(x.nbytes), sample, torch=rivals)

    return {
        FUSED: lambda: lab.fused_rival(fused, (x,), expected, shape, dtypes.name_of(x.dtype), sample),
        EAGER: lambda: torch(False),
        COMPILED: lambda: torch(True),
        "cupyx": lambda: lab.rival(functools.partial(cupyx, x), expected, int(x.nbytes), sample),
        "device copy": lambda: lab.device_copy(x, _moved(operation, x)),
    }


def _moved(operation: str, x: Any) -> int:
    return int(x.nbytes) * (2 if operation == "softmax" else 1)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every dtype, row length and operation."""
    compile_budget = CompileBudget(options.compile_budget)
    for dtype in options.dtypes:
        data = draw(lab, dtype, options.bytes // dtypes.ITEMSIZE[dtype], options.seed)
        for columns in options.lengths:
            rows = max(1, data.size // columns)
            x = data[: rows * columns].reshape(rows, columns)
            for operation in ("softmax", "logsumexp"):
                lab.release()
                case = Case(f"{operation} {dtype}", f"{rows} x {columns}", (rows, columns), dtype, _moved(operation, x))
                yield run(lab, case, _factories(lab, operation, x, compile_budget), ("gpu_evicted",), options.budget)
        del data, x
