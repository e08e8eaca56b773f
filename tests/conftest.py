"""Fixtures that every test may use."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import CUDA, NUMPY, Engine

settings.register_profile(
    "cupyfuse",
    max_examples=int(os.environ.get("CUPYFUSE_EXAMPLES", "300")),
    deadline=None,
    derandomize="CUPYFUSE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cupyfuse")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in every run, and others in every test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(params=[pytest.param(NUMPY, id="numpy"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """The array library whose arrays the case runs on; CuPy where there is a GPU."""
    engine: Engine = request.param
    engine.require()
    return engine
