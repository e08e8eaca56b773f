"""The host's speed, measured: the rates are those of a host on which a small operation takes PyTorch 5 us."""

from __future__ import annotations

import math
import time

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .rates import EAGER

_ROUNDS, _CALLS = 5, 40
_scales: dict[torch.device, float] = {}


def host_scale(place: torch.device) -> float:
    """Return how many times as long as by the rates the host takes to enqueue work on a device: a power of two.

    It is measured once for each GPU, in about two milliseconds, and at least 1; 1 for CPUs, and while a CUDA graph is
    being captured. Rounding keeps decisions alike from process to process.
    """
    if place.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return 1.0
    found = _scales.get(place)
    if found is None:
        found = _scales[place] = rounded_scale(_seconds_of_an_operation(place))
    return found


def rounded_scale(seconds: float) -> float:
    """Return the power of two, at least 1, nearest to how often the rates' time of an operation goes into `seconds`."""
    return float(2 ** max(0, round(math.log2(seconds / EAGER))))


def _seconds_of_an_operation(place: torch.device) -> float:
    """Measure what the host takes to enqueue a small operation, in the best of several rounds."""
    best = math.inf
    with _disable_current_modes(), torch.no_grad():
        x = torch.ones(64, device=place)
        for _ in range(1 + _ROUNDS):  # the first loads the kernel
            torch.cuda.synchronize(place)
            began = time.perf_counter()
            for _ in range(_CALLS):
                torch.add(x, x)
            best = min(best, (time.perf_counter() - began) / _CALLS)
    return best
