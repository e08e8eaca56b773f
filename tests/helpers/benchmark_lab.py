"""A GPU and a CuPy made of the host and NumPy, for the benchmarks' tests."""

import types

import numpy as np

from benchmarks.device import GRAPH_CALLS, Host
from benchmarks.report import Result
from benchmarks.timing import summarize

ENVIRONMENT = {"gpu": "Fake GPU 9000", "cupy": "14.2.0", "torch": None}


class FakeCupy(types.ModuleType):
    """NumPy under CuPy's name."""

    def __getattr__(self, name):
        return getattr(np, name)

    asnumpy = staticmethod(np.asarray)

    @staticmethod
    def get_default_memory_pool():
        return types.SimpleNamespace(free_all_blocks=lambda: None)


class FakeDevice(Host):
    """A GPU whose clock is the host's."""

    name = "Fake GPU 9000"
    evict = staticmethod(lambda: None)
    hold = staticmethod(lambda microseconds: None)

    def copy(self, target, source):
        target[...] = source

    def capture(self, call):
        call()
        return lambda: [call() for _ in range(GRAPH_CALLS)]


def timed(rival, error=1e-7, **medians):
    """A result with an error, and one sample of each figure."""
    return Result(rival, error, {figure: summarize([median]) for figure, median in medians.items()})
