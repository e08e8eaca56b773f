"""A kernel of one array from a few lines of CUDA, run on the CPU."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from support import HOST

from cupyfuse.cuda.config import Config
from cupyfuse.cuda.kernel import Kernel

THREADS, TURNS = 64, 12


def kernel(body: str, cluster: int = 1, shared: int = 0) -> Kernel:
    """A kernel of an array of floats `x` of length `n`; the first line of `body` is its line 4."""
    source = 'struct Program { float* x; long long n; };\nextern "C" __global__ void\ntrial(const Program p) {\n'
    return Kernel("trial", f"{source}{body}\n}}\n", (), Config("none", THREADS, 1, 1), "", shared, cluster)


def run(
    body: str,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = THREADS,
    values: Any = None,
    cluster: int = 1,
    shared: int = 0,
) -> Any:
    """The array after each of several launches, the threads in another order in each."""
    function = HOST.runtime.function(kernel(body, cluster, shared))
    results = []
    for _ in range(TURNS):
        x = HOST.xp.asarray(np.arange(256, dtype=np.float32) if values is None else values)
        program = np.frombuffer(struct.pack("=Qq", HOST.runtime.address(x), x.size), "V16")
        function(grid, (threads, 1, 1), (program,))
        results.append(x.get())
    return results
