"""The host's speed, measured: the rates are those of a host on which a small operation in a loop takes PyTorch 5 us."""

from __future__ import annotations

import math
import time

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .rates import IN_A_LOOP

_ROUNDS, _CALLS = 5, 40
_scales: dict[torch.device, float] = {}


def host_scale(place: torch.device) -> float:
    """Return by how much the host is slower than the rates assume, as a power of two, at least 1.

    It is measured once for each GPU, on a stream of its own; 1 for CPUs, without a usable GPU, and while a CUDA graph
    is being captured. Rounding keeps decisions alike from process to process; faster hosts were not measured.
    """
    if place.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return 1.0
    found = _scales.get(place)
    if found is None:
        found = _scales[place] = rounded_scale(_seconds_of_an_operation(place))
    return found


def rounded_scale(seconds: float) -> float:
    """Round seconds of an operation over those of the rates to a power of two, at least 1."""
    return float(2 ** max(0, round(math.log2(seconds / IN_A_LOOP))))


def _seconds_of_an_operation(place: torch.device) -> float:
    """Measure what the host takes to enqueue a small operation, in the best of several rounds."""
    best = math.inf
    stream = torch.cuda.Stream(place)
    with _disable_current_modes(), torch.no_grad(), torch.cuda.stream(stream):
        x = torch.ones(64, device=place)
        for _ in range(1 + _ROUNDS):  # the first loads the kernel
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(_CALLS):
                torch.add(x, x)
            best = min(best, (time.perf_counter() - began) / _CALLS)
    return best
