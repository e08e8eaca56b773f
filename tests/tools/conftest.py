"""Fixtures of the benchmarks' tests."""

import sys

import pytest
import scipy.special
from benchmark_lab import FakeCupy, FakeDevice

from benchmarks import rows, timing
from benchmarks.lab import Lab


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", scipy.special)  # of the heads' plain functions
    return Lab(FakeDevice(), FakeCupy("cupy"), scipy.special, None, "not installed")


@pytest.fixture
def torch_lab(lab, monkeypatch):
    """With PyTorch on the CPU, where nothing is compiled or captured."""
    import torch

    from benchmarks import pytorch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only quarrel with NumPy's over these small arrays
    monkeypatch.setattr(pytorch, "poison", lambda size: None)
    monkeypatch.setattr(pytorch, "release", lambda: None)
    monkeypatch.setattr(pytorch, "compile_static", lambda function, mode="default", backend="inductor": function)
    lab.torch = pytorch
    yield lab
    torch.set_num_threads(threads)


@pytest.fixture
def hasty(monkeypatch):
    """One repeat of everything, on little data."""
    monkeypatch.setattr(timing, "clamp", lambda wanted, low, high: 1)
    monkeypatch.setitem(rows.DEFAULTS, "bytes", (1 << 14, 1 << 14))


@pytest.fixture
def on_cpu(monkeypatch):
    """Keep the modules beside NumPy's arrays, on a machine with a GPU too."""
    from benchmarks import pytorch

    monkeypatch.setattr(pytorch, "device_type", lambda: "cpu")
    monkeypatch.setattr(pytorch, "measure_memory", lambda call: pytorch.Memory() if call() is not None else None)
    monkeypatch.setattr(pytorch, "memory_held", lambda: (0, 0))
