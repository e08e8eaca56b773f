"""Cases of tests that rotate: a seventh a day, of every test and of every parameter's values."""

from __future__ import annotations

import itertools
from collections import Counter

from support import DAYS, of_day


def test_a_week_has_all_cases_and_each_day_as_many() -> None:
    cases = [f"tests/{test}.py::test[{k}]" for test, count in (("a", 2), ("b", 7), ("c", 40)) for k in range(count)]
    days = [of_day(day, reversed(cases) if day % 2 else cases) for day in range(700_000, 700_000 + 2 * DAYS)]
    for start in range(DAYS + 1):
        assert sorted(itertools.chain(*days[start : start + DAYS])) == sorted(cases)
    for day in days:
        counts = Counter(case.partition("::")[0] for case in day)
        assert counts["tests/b.py"] == 1 and counts["tests/a.py"] <= 1 and counts["tests/c.py"] in (5, 6)


def test_a_day_has_every_value_of_a_parameter() -> None:
    dtypes, axes = ("float16", "float32", "float64"), range(28)
    cases = [f"t.py::test[{axis}-{dtype}]" for axis in axes for dtype in dtypes]
    for day in range(DAYS):
        assert {case.rpartition("-")[2].rstrip("]") for case in of_day(day, cases)} == set(dtypes)


def test_tests_of_one_case_have_different_days() -> None:
    cases = [f"t.py::test_{k}" for k in range(70)]
    assert all(3 <= len(of_day(day, cases)) <= 20 for day in range(DAYS))
