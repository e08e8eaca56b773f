"""Every example script runs as a reader would run it; each checks its own results and fails by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupyfuse

ROOT = Path(cupyfuse.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")


def test_there_are_examples() -> None:
    assert {"quickstart.py", "head_logsumexp.py", "head_sum.py", "head_softmax.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
