"""The ways to compute a case: through cupyfuse, an array library, PyTorch eager and compiled; how each is checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cupyfuse import dtypes

from .device import Call

# The names of rivals in several reports.
BOUND, OURS, EAGER = "cupyfuse, bound", "cupyfuse", "torch eager"
COMPILED, AUTOTUNED = "torch.compile", "torch.compile, max-autotune"
FUSED, DROP_IN, BACKEND = "cupyfuse.torch.fuse", "cupyfuse drop-in", "cupyfuse backend"
FUSED_GRAPHS, BACKEND_GRAPHS, COMPILED_GRAPHS = f"{FUSED}, graphs", f"{BACKEND}, graphs", f"{COMPILED}, graphs"

# Modes and backends of torch.compile; options of `cupyfuse.torch.fuse`.
_COMPILED = {
    COMPILED: ("default", "inductor"),
    AUTOTUNED: ("max-autotune", "inductor"),
    COMPILED_GRAPHS: ("reduce-overhead", "inductor"),
    BACKEND: ("default", "cupyfuse"),
    BACKEND_GRAPHS: ("reduce-overhead", "cupyfuse"),
}
_FUSED: dict[str, dict[str, Any]] = {FUSED: {}, FUSED_GRAPHS: {"graphs": True}}


class Unavailable(Exception):
    """A rival cannot take part; the message is what the report says."""


@dataclass
class Rival:
    """One way to compute a case."""

    call: Call  # what is timed
    attempts: Sequence[Callable[[], list[Any]]]  # compute once from fresh state into poisoned memory; return float64
    expected: Sequence[Any]  # what attempts should return
    capture: Callable[[], Call] | None = None  # captures the call in a CUDA graph and returns its launch
    sizes: Sequence[Any] = ()  # beside `expected`: what the error of each element is relative to
    limit: float | None = None  # of errors that are not wrong, by element where there are `sizes`, else by norm
    before: Call | None = None  # run untimed before each call that is timed by itself
    judged: bool = True  # whether an error beyond the limit is a failure


def fuse(module: Any, **options: Any) -> Any:
    from cupyfuse.torch import fuse

    return fuse(module, **options)


def drop_in_softmax() -> Any:
    from cupyfuse.torch import Softmax

    return Softmax(dim=1)


def as_run_by(rival: str, lab: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or module of PyTorch as a rival runs it, nothing compiled yet."""
    if rival in _FUSED:
        return fuse(function, **_FUSED[rival])
    if rival in _COMPILED:
        return lab.need_torch(compiling=True).compile_static(function, *_COMPILED[rival])
    return function


def spread(rows: int, most: int) -> int:
    """Return the step of a slice that takes at most so many rows, or one: where float64 is slow, these are compared."""
    return -(-rows // max(1, min(rows, most)))


@dataclass
class Computation:
    """What the rivals of a case compute: calls that return a new array of `shape` and `dtype`."""

    lab: Any
    expected: Sequence[Any]  # in float64
    shape: tuple[int, ...]
    dtype: str
    every: int = 1  # the step from one row that is compared to the next
    reset: Call = lambda: None  # restores the state that calls change
    state: Callable[[], list[Any]] = list  # returns the state that is compared too, in float64
    sizes: Sequence[Any] = ()
    limit: float | None = None

    def by(self, call: Call, torch: Any = None) -> Rival:
        """Return a call as a rival: of an array library or, with `torch` (`benchmarks.pytorch`), one of tensors."""
        lab = self.lab
        double = functools.partial(torch.as_double, xp=lab.cupy) if torch else lab.as_double
        poison, capture = (torch.poison, torch.capture) if torch else (lab.poison_pool, lab.device.capture)

        def attempt() -> list[Any]:
            self.reset()
            poison(dtypes.to_numpy(self.dtype).itemsize * math.prod(self.shape))
            return [double(call()[:: self.every]), *self.state()]

        return Rival(call, [attempt], self.expected, functools.partial(capture, call), self.sizes, self.limit)

    def by_ours(self, function: Callable[..., Any], *arguments: Any) -> Rival:
        """Return a cupyfuse function as a rival, checked with an array given as `out` and with one of its own."""
        lab = self.lab

        def allocate() -> Any:
            return lab.allocate_poisoned(self.shape, dtypes.to_numpy(self.dtype))

        def attempt_with_out() -> list[Any]:
            self.reset()
            target = allocate()
            function(*arguments, out=target)
            missing = lab.count_unwritten(target)
            if missing:
                raise RuntimeError(f"{missing} of {target.size} elements of out were not written")
            return [lab.as_double(target[:: self.every]), *self.state()]

        rival = self.by(functools.partial(function, *arguments))
        rival.attempts = [attempt_with_out, *rival.attempts]
        rival.capture = lambda: lab.device.capture(functools.partial(function, *arguments, out=allocate()))
        return rival

    def by_torch(self, rival: str, function: Callable[..., Any], *arrays: Any) -> Rival:
        """Return a function or module of PyTorch, on tensors over the arrays' memory, as a rival runs it."""
        torch = self.lab.need_torch()
        called = as_run_by(rival, self.lab, function)
        return self.by(functools.partial(called, *map(torch.as_tensor, arrays)), torch)


def device_copy(lab: Any, source: Any, bytes_moved: int) -> Rival:
    """Return a copy that reads half of `bytes_moved` and writes as many: the memory's bandwidth."""
    flat = source.reshape(-1)[: bytes_moved // 2 // source.dtype.itemsize]
    target = lab.allocate_poisoned(flat.shape, flat.dtype)
    call = functools.partial(lab.device.copy, target, flat)

    def attempt() -> list[Any]:
        call()
        return [lab.as_double(target[-4096:])]

    return Rival(call, [attempt], [lab.as_double(flat[-4096:])], functools.partial(lab.device.capture, call))
