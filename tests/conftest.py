"""Fixtures that every test may use."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import CUDA, HOST, NUMPY, Engine

settings.register_profile(
    "cupyfuse",
    max_examples=int(os.environ.get("CUPYFUSE_EXAMPLES", "2000")),
    deadline=None,
    derandomize="CUPYFUSE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cupyfuse")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in every run, and others in every test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


ENGINES = (
    pytest.param(NUMPY, id="numpy"),
    pytest.param(HOST, id="host"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of the case: NumPy's, the kernels on the CPU, and on a GPU where there is one."""
    engine: Engine = request.param
    engine.require()
    with engine.active():
        yield engine


@pytest.fixture
def every_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse every chain that can be fused, however small: the cost model chooses nothing."""
    from cupyfuse.torch.cost import decision
    from cupyfuse.torch.graphs import partition

    monkeypatch.setattr(decision, "judge_for", lambda *args, **kwargs: partition.anything)
