"""Chains on DTensors, in two, three and four processes: the cases of `sharded_cases.py`, each a test here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_cases
import torch
from support import HELPERS, ROOT, chosen

from cupyfuse.ir import graph as g
from cupyfuse.settings import Settings
from cupyfuse.torch.sharded.executor import _divided
from cupyfuse.torch.sharded.operator import from_text, to_text
from cupyfuse.torch.sharded.placements import chunks

LIMIT = 400  # seconds for all cases


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest,
    shared_result: Callable[[str, Callable[[], Any]], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """For each case, how it failed in each of the processes that finished it; empty texts where it did not."""
    names = [case["name"] for case in chosen(request.session, test_chains_on_shards)]
    return shared_result("sharded", lambda: run_cases(names, tmp_path_factory.mktemp("sharded")))


def run_cases(names: list[str], folder: Path) -> dict[str, list[str]]:
    paths = os.pathsep.join([str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HELPERS / "sharded_cases.py"), str(folder), *names]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        try:
            subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            print("the processes were stuck")
    found: dict[str, list[str]] = {}
    for path in folder.glob("[0-9]*-[0-9]*"):
        for line in path.read_text().splitlines():
            name, error = json.loads(line)
            found.setdefault(name, []).append(error)
    if len(found) < len(names):
        print((folder / "log").read_text()[-5000:])
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("name", sharded_cases.CASES)
def test_chains_on_shards(name: str, outcome: dict[str, list[str]]) -> None:
    errors = outcome.get(name, [])
    assert not any(errors), "\n".join(filter(None, errors))
    (count,), _ = sharded_cases.CASES[name]
    assert len(errors) == count, "it did not run to its end in all processes"


@pytest.mark.parametrize(("length", "count"), [(10, 2), (10, 3), (2, 3), (4, 4), (9, 4), (0, 2)])
def test_shards_are_as_wide_as_those_of_dtensor(length: int, count: int) -> None:
    found = [len(part) for part in torch.arange(length).chunk(count)] if length else []
    assert chunks(length, count) == (*found, *[0] * (count - len(found)))


@pytest.mark.parametrize(
    ("most", "shards", "expected"),
    [(256 << 20, 2, 176 << 20), (256 << 20, 1, 256 << 20), (256 << 20, 8, 80 << 20), (1000, 8, 1000)],
)
def test_shards_divide_the_workspace(most: int, shards: int, expected: int) -> None:
    assert _divided(Settings(max_workspace=most), shards).max_workspace == expected


def test_a_graph_is_written_and_read_again() -> None:
    x, w = g.argument(0, "x", (3, 4), "bfloat16"), g.argument(1, "w", (5, 4), "bfloat16")
    y = g.matmul(x, g.transpose(w))
    top = g.reduce("max", y, 1)
    numbers = [g.const(value) for value in (-0.0, float("-inf"), 1, True, 0.1)]
    outputs = [g.pointwise("where", g.pointwise("equal", y, top), y, number) for number in numbers]
    graph = g.Graph([x, w], [*outputs, g.cast(g.positions(5, 1), "float32")])
    again = from_text(to_text(graph))
    assert to_text(again) == to_text(graph)
    assert [repr(n.inputs[2].value) for n in again.outputs[:-1]] == ["-0.0", "-inf", "1", "True", "0.1"]
    assert again.outputs[0].inputs[1] is again.outputs[1].inputs[1]
