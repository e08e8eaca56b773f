"""Softmax and logsumexp over rows of many lengths: memory bandwidth on data that no cache holds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import dtypes

from .cases import Lab, Rival, Unavailable, run
from .report import Case
from .tails import device_copy

LENGTHS = (256, 1000, 1024, 4096, 8191, 8192, 16384, 32768, 50257, 65536, 131072, 262144)
QUICK_LENGTHS = (256, 1000, 8192, 50257, 262144)
BYTES, QUICK_BYTES = 1 << 30, 1 << 27
BUDGET, QUICK_BUDGET = 0.15, 0.03  # GPU seconds for each rival of a case
_BLOCK = 1 << 24  # elements drawn; the rest of the data are multiples of them
_CHECKED = 1 << 20  # elements compared at the start, in the middle and at the end


@cf.fuse
def row_softmax(x: Any) -> Any:
    """Softmax over each row; from (B, N) to (B, N)."""
    return cf.softmax(x, axis=1)


@cf.fuse
def row_logsumexp(x: Any) -> Any:
    """Logsumexp over each row; from (B, N) to (B,)."""
    return cf.logsumexp(x, axis=1)


@dataclass(frozen=True)
class Options:
    """What to run; `compile_budget` are the seconds after which no more shapes are compiled by torch."""

    lengths: tuple[int, ...] = LENGTHS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    quick: bool = False
    compile_budget: float = 180.0
    seed: int = 0

    @property
    def size(self) -> int:
        """Bytes of data, near enough: whole rows of it."""
        return QUICK_BYTES if self.quick else BYTES

    @property
    def budget(self) -> float:
        return QUICK_BUDGET if self.quick else BUDGET


class Patience:
    """Seconds that may still be spent on torch.compile."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._left = seconds

    def spend(self, work: Callable[[], Any]) -> Any:
        """Do some work and count its time; raises `Unavailable` once the time is spent."""
        if self._left <= 0.0:
            raise Unavailable(f"not compiled: the {self._seconds:.0f} s given to torch.compile were spent")
        began = time.perf_counter()
        try:
            return work()
        finally:
            self._left -= time.perf_counter() - began


def draw(lab: Lab, dtype: str, count: int, seed: int) -> Any:
    """`count` numbers, normally distributed, on the GPU: one block of them, scaled differently again and again."""
    block = lab.cupy.asarray(np.random.default_rng(seed).standard_normal(min(count, _BLOCK), dtype=np.float32))
    data = lab.cupy.empty(count, dtypes.to_numpy(dtype))
    for number, start in enumerate(range(0, count, _BLOCK)):
        piece = block[: min(_BLOCK, count - start)] * np.float32(1.0 + number / 64)
        data[start : start + _BLOCK] = piece.astype(data.dtype)
    return data


class Rows:
    """One function over rows of one length.

    Parameters
    ----------
    lab : Lab
    operation : {"softmax", "logsumexp"}
    x : cupy.ndarray, (B, N)
    patience : Patience
    """

    def __init__(self, lab: Lab, operation: str, x: Any, patience: Patience):
        self._lab = lab
        self._operation = operation
        self._x = x
        self._patience = patience
        self._fused = row_softmax if operation == "softmax" else row_logsumexp
        rows, columns = x.shape
        few = max(1, min(rows, _CHECKED // columns))
        self._checked = [slice(start, start + few) for start in sorted({0, (rows - few) // 2, rows - few})]
        self.moved = int(x.nbytes) * (2 if operation == "softmax" else 1)
        reference = getattr(lab.special, operation)
        self.expected = [lab.cupy.concatenate([reference(lab.as_double(x[s]), axis=1) for s in self._checked])]

    def _sample(self, result: Any) -> list[Any]:
        return [self._lab.cupy.concatenate([self._lab.as_double(result[s]) for s in self._checked])]

    def factories(self) -> dict[str, Callable[[], Rival]]:
        return {
            "cupyfuse": self._cupyfuse,
            "torch eager": self._eager,
            "torch.compile": self._compiled,
            "cupyx": self._cupyx,
            "device copy": lambda: device_copy(self._lab, self._x, self.moved),
        }

    def _cupyfuse(self) -> Rival:
        shape = self._x.shape if self._operation == "softmax" else self._x.shape[:1]
        out = (shape, dtypes.name_of(self._x.dtype))
        attempts = self._lab.fused_attempts(self._fused, (self._x,), out, self._sample)
        return Rival(functools.partial(self._fused, self._x), attempts, self.expected)

    def _cupyx(self) -> Rival:
        call = functools.partial(getattr(self._lab.special, self._operation), self._x, axis=1)
        return Rival(call, [lambda: self._sample(call())], self.expected)

    def _torch(self, torch: Any, function: Callable[..., Any]) -> Rival:
        call = functools.partial(function, torch.share(self._x))

        def attempt() -> list[Any]:
            torch.poison(int(self._x.nbytes))
            result, xp = call(), self._lab.cupy
            return [xp.concatenate([torch.as_double(result[s], xp) for s in self._checked])]

        return Rival(call, [attempt], self.expected)

    def _eager(self) -> Rival:
        torch = self._lab.need_torch()
        return self._torch(torch, getattr(torch, self._operation))

    def _compiled(self) -> Rival:
        torch = self._lab.need_compiler()
        rival = self._torch(torch, torch.compiled(getattr(torch, self._operation)))
        self._patience.spend(rival.call)
        return rival


def cases(lab: Lab, options: Options) -> Iterator[Case]:
    """Run every dtype, row length and operation."""
    patience = Patience(options.compile_budget)
    for dtype in options.dtypes:
        itemsize = dtypes.ITEMSIZE[dtype]
        data = draw(lab, dtype, options.size // itemsize, options.seed)
        for columns in options.lengths:
            rows = max(1, data.size // columns)
            x = data[: rows * columns].reshape(rows, columns)
            for operation in ("softmax", "logsumexp"):
                lab.release()
                work = Rows(lab, operation, x, patience)
                case = Case(f"{operation} {dtype}", f"{rows} x {columns}", (rows, columns), dtype, work.moved)
                yield run(lab, case, work.factories(), ("gpu_evicted",), options.budget)
                del work
        del data, x
