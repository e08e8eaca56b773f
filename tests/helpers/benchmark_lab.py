"""A GPU and a CuPy made of the host and NumPy, for the benchmarks' tests."""

import time
import types

import numpy as np

from benchmarks.device import GRAPH_CALLS

ENVIRONMENT = {"gpu": "Fake GPU 9000", "cupy": "14.2.0", "torch": None}


class FakeCupy(types.ModuleType):
    """NumPy under CuPy's name."""

    def __getattr__(self, name):
        return getattr(np, name)

    asnumpy = staticmethod(np.asarray)

    @staticmethod
    def get_default_memory_pool():
        return types.SimpleNamespace(free_all_blocks=lambda: None)


class FakeDevice:
    """A GPU whose clock is the host's."""

    name = "Fake GPU 9000"
    synchronize = evict = staticmethod(lambda: None)
    hold = staticmethod(lambda microseconds: None)
    record = staticmethod(time.perf_counter)

    def elapsed(self, start, end):
        return (end - start) * 1e6

    def copy(self, target, source):
        target[...] = source

    def capture(self, call):
        call()
        return lambda: [call() for _ in range(GRAPH_CALLS)]
