"""More than one process: forks and spawns; kernel caches that are broken, shared or missing; the sanitizer's script.

Every case runs in processes of its own, from a file, so that what it breaks ends with it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sanitize
from support import ROOT, missing_gpu

LIMIT = 300  # seconds, after which a process counts as stuck

needs_gpu = pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu() or "needs a GPU")

# What the scripts share: arrays that need no kernel of CuPy's, and a chain with its result in float64.
COMMON = """
import os, sys, threading, time, traceback, warnings
import numpy as np
import cupyfuse as cf

@cf.fuse
def chain(x, w):
    y = x @ w.T
    return cf.softmax(y, axis=1), y.sum(axis=0), cf.logsumexp(x, axis=1)

def arguments(rows=33, dtype=np.float32):
    rng = np.random.default_rng(rows)
    return rng.standard_normal((rows, 70)).astype(dtype), rng.standard_normal((50, 70)).astype(dtype)

def right(results, rows=33):
    wide = [a.astype(np.float64) for a in arguments(rows)]
    for got, want in zip(results, chain.__wrapped__(*wide), strict=True):
        got = got.get() if hasattr(got, "get") else got
        if not np.allclose(got, want, rtol=1e-4, atol=1e-4):
            return False
    return True

def on_gpu(*arrays):
    import cupy
    return [cupy.asarray(a) for a in arrays]

def in_a_fork(work):
    '''Run work() in a forked child; what it says, or how it failed.'''
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 15
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "stuck"
        time.sleep(0.01)
    return os.read(reader, 1 << 16).decode()
"""


def script(folder: Path, code: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(f"{COMMON}\n{textwrap.dedent(code)}")
    return path


def environment(cache: Path | str | None) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if cache is not None:
        found["CUPY_CACHE_DIR"] = str(cache)
    return found


def output(path: Path, cache: Path | str | None = None) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT, env=environment(cache), check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# Forks --------------------------------------------------------------------------------------------------------------


def test_a_fork_computes_with_numpy(tmp_path: Path) -> None:
    """What was ready before, and what is new, in the child and then in the parent."""
    code = """
        assert right(chain(*arguments()))
        bound = chain.bind(w=arguments()[1])
        bound(arguments()[0])

        def work():
            return [right(chain(*arguments())), right(chain(*arguments(7)), 7), right(bound(arguments()[0]))]

        print(in_a_fork(work))
        print(work())
    """
    assert output(script(tmp_path, code)).split("\n")[:2] == ["[True, True, True]"] * 2


@pytest.mark.rotates
@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_workers_get_fused_and_bound_functions(tmp_path: Path, start: str) -> None:
    """As a pool sends them: functions by their names, bound arguments along with them."""
    code = f"""
        import multiprocessing

        if __name__ == "__main__":
            x, w = arguments()
            chain(x, w)
            with multiprocessing.get_context("{start}").Pool(2) as pool:
                results = pool.starmap(chain, [(x, w)] * 4) + pool.map(chain.bind(w=w), [x] * 4)
            print(all(map(right, results)), len(results))
    """
    assert output(script(tmp_path, code)).split() == ["True", "8"]


FORK_WHILE_TRACING = """
    started, release = threading.Event(), threading.Event()
    parent = os.getpid()

    @cf.fuse(static=("started", "release"))
    def slow(x):
        if os.getpid() == parent:
            started.set()
            release.wait(60)
        return cf.softmax(x, axis=1)

    x = np.ones((3, 5))
    thread = threading.Thread(target=slow, args=(x,))
    thread.start()
    started.wait(60)
    print(in_a_fork(lambda: round(slow(x).sum(), 6)))
    release.set()
    thread.join()
    print(round(slow(x).sum(), 6))
"""


def test_a_fork_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    lines = output(script(tmp_path, FORK_WHILE_TRACING)).split("\n")
    assert lines[:2] == ["3.0", "3.0"]


def test_a_process_knows_that_it_was_forked_from_one_that_used_cuda(tmp_path: Path) -> None:
    code = """
        from cupyfuse.cuda import compile
        print(in_a_fork(compile.check_process))
        compile.check_process()
        print(in_a_fork(compile.check_process))
        print(in_a_fork(lambda: in_a_fork(compile.check_process)))
        compile._lock.acquire()
        print(in_a_fork(lambda: compile._lock.acquire(timeout=5)))
    """
    before, after, grandchild, locked = output(script(tmp_path, code)).strip().split("\n")
    assert (before, locked) == ("None", "True")
    for line in (after, grandchild):
        assert line.startswith("EngineError: CUDA cannot be used in a process that was forked") and "'spawn'" in line


@pytest.mark.gpu
@needs_gpu
def test_a_fork_after_the_use_of_cuda_is_told_to_spawn(tmp_path: Path) -> None:
    """A kernel that was ready in the parent, one that was not, and one of a bound function."""
    code = """
        x, w = on_gpu(*arguments())
        bound = chain.bind(w=w)
        assert right(chain(x, w)) and right(bound(x))
        print(in_a_fork(lambda: chain(x, w)))
        print(in_a_fork(lambda: bound(x)))
        print(in_a_fork(lambda: cf.relu(x)))
        print(in_a_fork(lambda: right(chain(*arguments()))))
        print(right(chain(x, w)), right(bound(x)))
    """
    lines = output(script(tmp_path, code)).split("\n")
    for line in lines[:3]:
        assert line.startswith("EngineError: CUDA cannot be used in a process that was forked") and "spawn" in line
    # The NumPy engine works there, and the parent is none the worse for it.
    assert lines[3:5] == ["True", "True True"]


@pytest.mark.gpu
@needs_gpu
def test_a_fork_before_the_use_of_cuda_can_use_it(tmp_path: Path) -> None:
    code = """
        import cupy

        assert right(chain(*arguments()))
        print(in_a_fork(lambda: right(chain(*on_gpu(*arguments())))))
        print(right(chain(*on_gpu(*arguments()))))
    """
    assert output(script(tmp_path, code)).split() == ["True", "True"]


@pytest.mark.gpu
@needs_gpu
def test_spawned_workers_compute_on_the_gpu(tmp_path: Path) -> None:
    code = """
        import multiprocessing

        def work(rows):
            return right(chain(*on_gpu(*arguments(rows))), rows)

        if __name__ == "__main__":
            assert work(33)
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(work, [5, 33, 900]))
    """
    assert output(script(tmp_path, code)).strip() == "[True, True, True]"


# Kernel caches ------------------------------------------------------------------------------------------------------

COMPUTE = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = chain(*on_gpu(*arguments()))
    again = chain(*on_gpu(*arguments(5)))
print(right(results), right(again, 5), [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)])
"""


def files(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.iterdir() if path.suffix == ".cubin"}


def with_hash(cubin: bytes) -> bytes:
    """A file of the cache: the SHA-256 of what follows, and that."""
    return hashlib.sha256(cubin).digest() + cubin


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "shorter than its hash": lambda data: data[:17],
    "nothing but its hash": lambda data: data[:32],
    "half": lambda data: data[: len(data) // 2],
    "a byte changed": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "garbage": lambda data: os.urandom(len(data)),
}


@pytest.mark.gpu
@needs_gpu
def test_a_damaged_cache_is_compiled_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = script(tmp_path, COMPUTE)
    assert output(path, cache).startswith("True True []")
    whole = files(cache)
    assert len(whole) >= 2
    for name, damage in DAMAGES.items():
        for file, data in whole.items():
            file.write_bytes(damage(data))
        assert output(path, cache).startswith("True True []"), name
        mended = files(cache)
        assert mended.keys() == whole.keys()
        assert all(data == with_hash(data[32:]) for data in mended.values()), f"{name}: the cache was not mended"


@pytest.mark.gpu
@needs_gpu
def test_a_cache_full_of_binaries_that_no_gpu_loads_is_compiled_anew(tmp_path: Path) -> None:
    """Files that are whole, by their hashes, and hold no kernel."""
    cache = tmp_path / "cache"
    path = script(tmp_path, COMPUTE)
    output(path, cache)
    for file, data in files(cache).items():
        file.write_bytes(with_hash(b"no kernel" + bytes(len(data))))
    for _ in range(2):
        assert output(path, cache).startswith("True True []")
    assert all(data[32:36] == b"\x7fELF" for data in files(cache).values())


UNWRITABLE = {
    # A directory that takes no files, whoever asks.
    "proc": "",
    # What CuPy found at its start became a file.
    "file": """
import cupy, shutil
shutil.rmtree(os.environ['CUPY_CACHE_DIR'])
open(os.environ['CUPY_CACHE_DIR'], 'w').close()
""",
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, kind: str) -> None:
    cache: Any = "/proc/self" if kind == "proc" else tmp_path / "cache"
    found = output(script(tmp_path, UNWRITABLE[kind] + COMPUTE), cache)
    assert found.startswith("True True ["), found
    assert found.count("CuPy's kernel cache cannot be used") == 1


@pytest.mark.gpu
@needs_gpu
def test_two_processes_compile_the_same_kernels_at_once(tmp_path: Path) -> None:
    """Into one empty cache; whichever is last, what lies there is whole."""
    cache = tmp_path / "cache"
    path = script(tmp_path, COMPUTE)
    for _ in range(3):
        for file in files(cache) if cache.exists() else ():
            file.unlink()
        started = [
            subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=environment(cache))
            for _ in range(3)
        ]
        for process in started:
            found, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0 and found.startswith("True True []")
        for data in files(cache).values():
            assert data == with_hash(data[32:])
        assert {path.suffix for path in cache.iterdir()} == {".cubin"}, "unfinished files were left"


# The sanitizer's script ---------------------------------------------------------------------------------------------

SUMMARIES = {"racecheck": "RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"}
SANITIZER = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
if "--help" in arguments:
    print("--padding --racecheck-report")
    raise SystemExit
tool, log = (arguments[arguments.index(name) + 1] for name in ("--tool", "--log-file"))
assert "--initcheck-address-space" not in arguments, "an option that this version does not know"
status = subprocess.call(arguments[arguments.index(log) + 1 :])
with open(log, "w") as file:
    print("========= COMPUTE-SANITIZER", file=file)
    found = {found}.get(tool, 0)
    if found:
        print("========= a finding of", tool, file=file)
    if found is not None:
        print("=========", {summaries}.get(tool, "ERROR SUMMARY: {{0}} errors").format(found), file=file)
raise SystemExit(9 if found else status)
"""


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({}, 0, "clean"),
        ({"racecheck": 2}, 1, "racecheck: NOT CLEAN; RACECHECK SUMMARY: 2 hazards"),
        ({"synccheck": 1}, 1, "synccheck: NOT CLEAN; ERROR SUMMARY: 1 errors"),
        ({"initcheck": None}, 1, "initcheck: NOT CLEAN; no summary"),
    ],
)
def test_the_sanitizers_script_tells_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, int | None], status: int, words: str
) -> None:
    tool, cases, log = tmp_path / "compute-sanitizer", tmp_path / "cases.py", tmp_path / "log"
    tool.write_text(SANITIZER.format(python=sys.executable, found=found, summaries=SUMMARIES))
    tool.chmod(0o755)
    cases.write_text("print('the cases ran')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitize.main(["--log", str(log), "--cases", str(cases)]) == status
    written = log.read_text().split("\n")
    assert any(line.startswith(words) for line in written), written
    assert written.count("the cases ran") == 1 + len(sanitize.TOOLS)
    for name in found:
        assert f"========= a finding of {name}" in written or found[name] is None
    assert sanitize.main(["--log", str(log), "--cases", str(cases), "--tool", "memcheck"]) == 0


def test_the_sanitizers_script_stops_where_the_cases_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda: ["compute-sanitizer"])
    cases, log = tmp_path / "cases.py", tmp_path / "log"
    cases.write_text("raise SystemExit('wrong result')")
    assert sanitize.main(["--log", str(log), "--cases", str(cases)]) == 1
    assert "wrong result" in log.read_text() and log.read_text().endswith("NOT CLEAN\n")
    cases.write_text("import time; time.sleep(60)")
    assert sanitize.main(["--log", str(log), "--cases", str(cases), "--timeout", "1"]) == 1


def test_the_sanitizers_script_says_where_to_get_the_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "places", lambda: iter(()))
    assert sanitize.main([]) == 2
    assert "pip install nvidia-cuda-sanitizer-api" in capsys.readouterr().err
