"""What random functions read of random objects is read in each call, whichever way the objects change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from object_programs import ObjectProgram, compare

import cupyfuse as cf
from cupyfuse.settings import force_plans

PARTS, PROGRAMS, CHANGES = 4, 30, 6


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """In the place of the fixture that lets plans run always."""
    yield


@pytest.mark.rotates
@pytest.mark.parametrize("way", [force_plans, contextlib.nullcontext], ids=["plans", "chosen"])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_functions_read_objects(part: int, way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        monkeypatch.setattr("cupyfuse.api.inline_cache._WALKED", 1 + seed % 3)  # so that generated code compares, too
        program = ObjectProgram(seed)
        fused = cf.fuse(program.function)
        with way():
            difference = compare(program, fused, CHANGES)
        program.close()
        assert difference is None, f"program {seed} {difference}"
        compared += bool(fused.plans)
    assert compared > PROGRAMS / 2
