"""What random functions read around them, and of random objects and numbers, is read in each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import number_programs
import object_programs
import pytest
import state_programs
from number_programs import NumberProgram, NumbersAround
from object_programs import ObjectProgram
from state_programs import StateProgram

import cupyfuse as cf
from cupyfuse.settings import force_plans

# Programs: how they are made and compared, parts, programs of each, changes.
KINDS = {
    "state": (StateProgram, state_programs.compare, 7, 60, 10),
    "objects": (ObjectProgram, object_programs.compare, 4, 30, 6),
    "numbers": (NumberProgram, number_programs.compare, 4, 25, 14),
    "numbers around": (NumbersAround, number_programs.compare, 4, 25, 14),
}
CASES = [(kind, part) for kind, (_, _, parts, _, _) in KINDS.items() for part in range(parts)]


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """In the place of the fixture that lets plans run always."""
    yield


@pytest.mark.rotates
@pytest.mark.parametrize("way", [force_plans, contextlib.nullcontext], ids=["plans", "chosen"])
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_random_functions_read_what_they_are_given(
    kind: str, part: int, way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, compare, _, programs, changes = KINDS[kind]
    compared = 0
    for seed in range(part * programs, (part + 1) * programs):
        monkeypatch.setattr("cupyfuse.api.inline_cache._WALKED", 1 + seed % 3)  # so that generated code compares, too
        program = make(seed)
        fused = cf.fuse(program.function)
        with way():
            difference = compare(program, fused, changes)  # type: ignore[arg-type]
        program.close()
        assert difference is None, f"program {seed} {difference}"
        compared += bool(fused.plans)
    assert compared > programs / 2
