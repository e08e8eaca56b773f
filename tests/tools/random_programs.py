"""Runs random programs of arrays of any number of dimensions, and shrinks those that fail.

    python tests/tools/random_programs.py --count 100000
    python tests/tools/random_programs.py --first 16351 --count 1 --shrink

The program of a number is the same in every run, and so are its arguments. Every 20th runs as kernels on the CPU, which
needs g++; without it, or with --no-kernels, those are left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "examples")]
BLOCK = 500  # programs, of which the kernels are compiled together


def run_block(block: tuple[int, int, bool]) -> list[tuple[int, str]]:
    """Run programs of some numbers; return those that fail, and how."""
    from nd_trials import trials

    warnings.simplefilter("ignore")
    first, last, kernels = block
    failed: list[tuple[int, str]] = []

    def report(number: int, error: Exception) -> None:
        failed.append((number, "".join(traceback.format_exception(error, limit=-2))))

    trials(range(first, last), report, kernels)
    return failed


def shrink(number: int) -> str:
    from nd_shrink import shrunk
    from nd_trials import trial_of

    program, way, seed = trial_of(number)
    smaller, its_way = shrunk(program, way, seed)
    return f"{its_way}\n{smaller!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--shrink", action="store_true", help="print the smallest form of each program that fails")
    options = parser.parse_args()
    from host_cuda.library import SHARED_BUILD

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    start, done, failed = time.perf_counter(), 0, 0
    last = options.first + options.count
    blocks = [(n, min(n + BLOCK, last), not options.no_kernels) for n in range(options.first, last, BLOCK)]
    with tempfile.TemporaryDirectory(prefix="random_programs_") as build:
        os.environ[SHARED_BUILD] = build
        with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=8) as pool:
            for found, (low, high, _) in zip(pool.imap(run_block, blocks), blocks, strict=True):
                done += high - low
                failed += len(found)
                for number, text in found:
                    print(f"program {number}: {text}", flush=True)
                    if options.shrink:
                        print(shrink(number), flush=True)
                rate = done / (time.perf_counter() - start)
                print(f"{done} programs, {failed} failed, {rate:.1f} programs/s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
