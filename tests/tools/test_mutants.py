"""Every mutant that the CPU can show is caught: break a kernel, its emission or its launch, and the tests fail."""

from __future__ import annotations

import datetime
import os

import pytest
from barriers import barriers
from mutant import Mutant
from mutants import MUTANTS
from mutate import ROOT, check, run_whole

ON_THE_CPU = [*(m for m in MUTANTS if not m.gpu), *barriers()]
ONE_BY_FILE = {m.tests[0]: m.tests for m in ON_THE_CPU}
# Each takes a second: every 21st is tried, others on other days; all with CUPYFUSE_ALL_TESTS set, or by mutate.py.
_DAYS = 21
_TURN = datetime.date.today().toordinal() % _DAYS
TRIED = [m for k, m in enumerate(ON_THE_CPU) if "CUPYFUSE_ALL_TESTS" in os.environ or k % _DAYS == _TURN]


@pytest.mark.rotates
@pytest.mark.parametrize("tests", ONE_BY_FILE.values(), ids=ONE_BY_FILE)
def test_nothing_fails_without_a_mutant(tests: tuple[str, ...]) -> None:
    """In the same copy and process: it is the mutants that fail there."""
    status, output = run_whole(tests)
    assert status == 0, output


@pytest.mark.parametrize("mutant", TRIED, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant) -> None:
    outcome = check(mutant)
    assert outcome.caught, f"no test of {' '.join(mutant.tests)} sees it: {outcome.why}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_still_apply(mutant: Mutant) -> None:
    """The text that a mutant exchanges is in its file, once."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1


def test_there_are_mutants_of_every_kind() -> None:
    assert len(ON_THE_CPU) >= 40
    assert {m.file.split("/")[0] for m in ON_THE_CPU} == {"kernels_cu", "cupyfuse", "launcher"}
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
