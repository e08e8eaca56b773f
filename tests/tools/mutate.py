"""Breaks the library on purpose, one way at a time, and shows that the tests see each.

    python tests/tools/mutate.py            every mutant that the CPU can show, in copies of the checkout
    python tests/tools/mutate.py --gpu      those that only a GPU can show, on one
    python tests/tools/mutate.py --list

A mutant is one exchange of text in one file. It is caught if its tests fail, and only counts if they pass without it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from barriers import barriers
from mutant import KERNELS, Mutant
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("cupyfuse", "kernels_cu", "launcher", "benchmarks", "examples", "tests", "setup.cfg")


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught: bool
    seconds: float
    why: str


def check(mutant: Mutant) -> Outcome:
    """Run a mutant's tests in a copy of the checkout in which it is broken."""
    start = time.perf_counter()
    copy = _copy()
    with _broken(mutant, copy):
        status, output = run_pytest(copy, mutant.tests)
    seconds = time.perf_counter() - start
    # 1: tests failed. 2 to 5: no test ran, or pytest itself failed, which shows nothing; below 0: a crash.
    return Outcome(mutant, status == 1 or status < 0, seconds, reason(status, output))


def run_whole(tests: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of tests in a copy in which nothing is broken."""
    return run_pytest(_copy(), tests)


_COPIES = threading.local()


def _copy() -> Path:
    """Return this thread's copy of the checkout, which its mutants share one after the other, and its bytecode."""
    if not hasattr(_COPIES, "path"):
        folder = tempfile.TemporaryDirectory(prefix="mutants_")
        atexit.register(folder.cleanup)
        _COPIES.path = Path(folder.name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, _COPIES.path / part)
            else:
                shutil.copy(ROOT / part, _COPIES.path / part)
    return _COPIES.path


@contextlib.contextmanager
def _broken(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Break one file of a copy, and put it back."""
    file = copy / mutant.file
    whole = file.read_text()
    mutant.apply(copy)
    _forget_bytecode(file)
    try:
        yield
    finally:
        file.write_text(whole)
        _forget_bytecode(file)


def _forget_bytecode(file: Path) -> None:
    """Python tells whether bytecode fits by size and second, which two texts may share."""
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        stale.unlink()


# What tests import from elsewhere, which every mutant's process gets ready from the one that it is forked from.
_IMPORTED = ["pytest", "hypothesis", "numpy", "scipy.special", "ml_dtypes", "torch"]


def run_pytest(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of the tests of a checkout; the status is negative after a crash."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(_IMPORTED)
    with tempfile.TemporaryDirectory(prefix="mutant_log_") as folder:
        log = Path(folder) / "log"
        process = processes.Process(target=_pytest_in, args=(str(root), list(tests), str(log)))
        process.start()
        process.join()
        status = process.exitcode
        assert status is not None
        return status, log.read_text(errors="replace") if log.exists() else ""


def _is_ours(path: str) -> bool:
    """Whether a path is in this checkout, and not in a virtual environment there."""
    return Path(path).is_relative_to(ROOT) and "site-packages" not in Path(path).parts


def _pytest_in(root: str, tests: list[str], log: str) -> None:
    """Run tests in a process that has imported nothing of any checkout."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = root
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["CUPYFUSE_ALL_TESTS"] = "1"  # a mutant's cases may be those of another day
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each takes time to load, and no test of a mutant uses one
    sys.dont_write_bytecode = False
    sys.path[:] = [root, *(path for path in sys.path if not _is_ours(path))]
    for name, module in list(sys.modules.items()):
        if _is_ours(str(getattr(module, "__file__", ""))):
            del sys.modules[name]
    import pytest

    gc.freeze()  # of what the first process has imported nothing is garbage
    sys.exit(pytest.main(["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *tests]))


def reason(status: int, output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("E  ", "FAILED", "ERROR", "/"))]
    return (lines or output.splitlines() or [f"exit status {status}"])[0].strip()[:160]


def run(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Check mutants, several at once, and print each outcome as it comes."""
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(check, mutants):
            verdict = "caught  " if outcome.caught else "SURVIVED"
            print(f"{verdict} {outcome.seconds:5.1f} s  {outcome.mutant.name}: {outcome.why}", flush=True)
            outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--gpu", action="store_true", help="the mutants that only a GPU can show, on one")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name holds this text")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    options = parser.parse_args()
    chosen = [m for m in (*MUTANTS, *barriers()) if m.gpu == options.gpu and options.only in m.name]
    if options.list:
        for m in MUTANTS:
            where = f"GPU only: {' '.join(m.tests)}" if m.gpu else "CPU"
            print(f"{m.name} ({m.file}; {where})")
        return 0
    print("without a mutant: ", end="", flush=True)
    status, output = run_whole((KERNELS, "-k", "cuda" if options.gpu else "host"))
    print(f"the tests FAIL: {reason(status, output)}" if status else "the tests pass", flush=True)
    outcomes = run(chosen, 1 if options.gpu else options.jobs)
    survivors = [o for o in outcomes if not o.caught]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants caught")
    return 1 if survivors or status or not outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
