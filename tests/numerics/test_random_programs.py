"""Random programs of arrays of any number of dimensions: what `tests/tools/random_programs.py` runs by the thousand."""

from __future__ import annotations

import numpy as np
import pytest
from nd_programs import check, drawn_program
from nd_trials import trial_of, trials

PROGRAMS, PARTS = 320, 8
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of variances without degrees of freedom


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int) -> None:
    """Every 20th as kernels, with bound arguments or in little memory, in all layouts, each with two sets of values."""

    def report(number: int, error: Exception) -> None:
        raise AssertionError(f"program {number}, {trial_of(number)[1]}:\n{trial_of(number)[0]!r}") from error

    size = PROGRAMS // PARTS
    trials(range(part * size, (part + 1) * size), report)


def test_the_bounds_hold_for_plain_numpy() -> None:
    """The reference itself: NumPy's own evaluation of the same text gives its dtypes, and stays within the bounds."""
    claimed = []
    for number in range(PROGRAMS):
        program = drawn_program(number, longest=20)
        if "float16" in repr(program):  # NumPy rounds each value to 16 bits
            continue
        arguments = program.arguments(np.random.default_rng(number))
        expected, after = program.expected(arguments)
        claimed.append(check(program.plain(arguments), expected, program.returned))
        check(arguments, after, program.names)
    assert len(claimed) > PROGRAMS / 2 and np.mean(claimed) > 0.85
