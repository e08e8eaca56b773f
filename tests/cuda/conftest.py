"""A GPU whose driver is the stand-in, and the compiled launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_stand_in import DriverStandIn, load_launcher
from launcher_cases import KERNELS

from cupyfuse.cuda import driver, launcher, tensor_map


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """CuPy and a driver, for a GPU of compute capability 9.0; `device.number` is the current device."""
    found = SimpleNamespace(number=0, driver=DriverStandIn(sized=True))
    runtime = SimpleNamespace(getDevice=lambda: found.number, driverGetVersion=lambda: 13000)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda _: SimpleNamespace(compute_capability="90"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    for module in (driver, tensor_map):
        monkeypatch.setattr(module, "driver", lambda: found.driver)
    driver._takes_early_launches.cache_clear()
    yield found
    driver._takes_early_launches.cache_clear()
    found.driver.call_directly()
    KERNELS.clear()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The compiled launcher, in force."""
    found = load_launcher(tmp_path)
    monkeypatch.setattr(launcher, "find", lambda: launcher.Found(found, ""))
    return found
