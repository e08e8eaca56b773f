"""The compiled launcher, for calls on the host's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_stand_in import load_launcher
from support import HOST

from cupyfuse.cuda import launcher


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The compiled launcher, in force, on arrays of the host's kernels."""
    found = load_launcher(tmp_path)
    monkeypatch.setattr(launcher, "find", lambda: launcher.Found(found, ""))
    with HOST.active():
        yield found
