"""Training in two processes: DistributedDataParallel, fully sharded and tensor-parallel models, fused in either order.

The processes run today's cases of `distributed_cases.py` once; each is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_cases
import pytest
from support import HELPERS, ROOT, chosen

LIMIT = 400  # seconds for all of them


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest,
    shared_result: Callable[[str, Callable[[], Any]], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """For each case, how it failed in each of the processes that finished it; empty texts where it did not."""
    names = [case["name"] for case in chosen(request.session, test_trains_as_pytorch_alone_does)]
    return shared_result("distributed", lambda: run_cases(names, tmp_path_factory.mktemp("distributed")))


def run_cases(names: list[str], folder: Path) -> dict[str, list[str]]:
    paths = os.pathsep.join([str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(HELPERS / "distributed_cases.py"), str(folder), *names]
    with open(folder / "log", "w") as log:
        started = [
            subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=log, stderr=log) for rank in range(2)
        ]
        try:
            for process in started:
                process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in started:
                process.kill()
                process.wait()
    found: dict[str, list[str]] = {}
    for rank in range(2):
        path = folder / str(rank)
        for line in path.read_text().splitlines() if path.exists() else ():
            name, error = json.loads(line)
            found.setdefault(name, []).append(error)
    if len(found) < len(names):
        print((folder / "log").read_text()[-5000:])
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("name", distributed_cases.CASES)
def test_trains_as_pytorch_alone_does(name: str, outcome: dict[str, list[str]]) -> None:
    errors = outcome.get(name, [])
    assert not any(errors), "\n".join(filter(None, errors))
    assert len(errors) == 2, "it did not run to its end in both processes"
