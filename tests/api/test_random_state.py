"""What random functions read around them is read in each call, whichever way it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from state_programs import StateProgram, compare

import cupyfuse as cf
from cupyfuse.settings import force_plans

PARTS, PROGRAMS, CHANGES = 7, 60, 10


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """In the place of the fixture that lets plans run always."""
    yield


@pytest.mark.rotates
@pytest.mark.parametrize("way", [force_plans, contextlib.nullcontext], ids=["plans", "chosen"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_functions_read_what_is_around_them(part: int, way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        monkeypatch.setattr("cupyfuse.api.inline_cache._WALKED", 1 + seed % 3)  # so that generated code compares, too
        program = StateProgram(seed)
        fused = cf.fuse(program.function)
        with way():
            difference = compare(program, fused, CHANGES)
        program.close()
        assert difference is None, f"program {seed} {difference}"
        compared += bool(fused.plans)
    assert compared > PROGRAMS / 2
