"""The engines whose GPU has our own product kernels, by the kernels on the CPU or on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import CUDA, HOST, Engine, require_hopper

from cupyfuse import devices, settings

OWN_KERNELS = [pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]


@contextmanager
def by_own_kernels(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Compute every product that our own kernels can by them."""
    engine.require()
    if engine is HOST:
        monkeypatch.setattr(engine.runtime, "device", devices.DEVICES["H200"])
    else:
        require_hopper()
    with engine.active(), settings.epilogues("always"):
        yield engine
