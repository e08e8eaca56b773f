"""Run the kernels under compute-sanitizer: `python tests/tools/sanitize.py [--tool memcheck ...] [--log FILE]`.

Runs `sanitized_cases.py` as it is, which compiles all kernels, and then under each tool. Every tool's command, summary
and findings go to one log; the exit status is 1 where there is a finding, or a tool did not come to its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "helpers" / "sanitized_cases.py"
TOOLS = {
    # Space behind each allocation, so that a stray access lands in none; CuPy itself reports failing calls.
    "memcheck": ["--padding", "512", "--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": ["--initcheck-address-space", "all"],
    "synccheck": [],
}
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: (\d+) .*)$", re.MULTILINE)
MISSING = (
    "compute-sanitizer was not found: it is part of the CUDA toolkit (put its bin on PATH), or "
    "pip install nvidia-cuda-sanitizer-api (CUDA 13) or nvidia-cuda-sanitizer-api-cu12"
)


@dataclass(frozen=True)
class Outcome:
    """How one tool ended."""

    tool: str
    command: list[str]
    seconds: float
    status: int | None  # None: it was stopped
    output: str  # of the cases
    report: str  # of the tool

    @property
    def summary(self) -> str:
        found = SUMMARY.search(self.report)
        return found.group(1) if found else "no summary: the tool did not come to its end"

    @property
    def clean(self) -> bool:
        found = SUMMARY.search(self.report)
        return self.status == 0 and found is not None and int(found.group(2)) == 0

    def __str__(self) -> str:
        ended = "stopped, out of time" if self.status is None else f"exit status {self.status}"
        lines = [f"{self.tool}: {'clean' if self.clean else 'NOT CLEAN'}; {self.summary}"]
        command = " ".join(Path(word).name if Path(word).is_absolute() else word for word in self.command)
        lines += [f"  command: {command}", f"  {self.seconds:.0f} s, {ended}"]
        return "\n".join([*lines, self.output.strip(), self.report.strip(), ""])


def places() -> Iterator[Path]:
    """Where compute-sanitizer may be: on PATH, in a toolkit, in a wheel."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        yield Path(on_path)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root) / "bin" / "compute-sanitizer"
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from Path(folder).glob("*/bin/compute-sanitizer")


def sanitizer() -> list[str]:
    """The beginning of a command; empty where there is no compute-sanitizer."""
    for path in places():
        if path.is_file():
            libraries = path.parent.parent / "lib"
            apart = (libraries / "libsanitizer-collection.so").is_file()
            return [str(path), *(["--injection-path", str(libraries)] if apart else [])]
    return []


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit status (None where it ran out of time) and everything that was written."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired as stopped:
        written = stopped.stdout or b""
        return None, written if isinstance(written, str) else written.decode(errors="replace")
    return done.returncode, done.stdout


def checked(start: list[str], tool: str, cases: list[str], seconds: float) -> Outcome:
    known = subprocess.run([*start[:1], "--help"], stdout=subprocess.PIPE, text=True).stdout
    # Options that this version does not have are left out, with what follows them.
    options = TOOLS[tool] if not TOOLS[tool] or TOOLS[tool][0] in known else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        command = [*start, "--tool", tool, *options, "--show-backtrace", "device", "--launch-timeout", "120"]
        command += ["--error-exitcode", "9", "--log-file", str(report), *cases]
        began = time.perf_counter()
        status, output = run(command, seconds)
        text = report.read_text(errors="replace") if report.exists() else ""
        return Outcome(tool, command, time.perf_counter() - began, status, output, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all four, in turn")
    parser.add_argument("--log", type=Path, default=Path("sanitize.log"), help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="SECONDS", help="of each tool; default: %(default)s"
    )
    parser.add_argument("--cases", type=Path, default=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    start = sanitizer()
    if not start:
        print(MISSING, file=sys.stderr)
        return 2
    cases = [sys.executable, str(options.cases)]
    status, output = run(cases, options.timeout)
    log = [f"without a tool: exit status {status}", output]
    print(*log, sep="\n", end="")
    clean = status == 0
    for tool in options.tool if clean else ():
        outcome = checked(start, tool, cases, options.timeout)
        log.append(str(outcome))
        print(outcome, flush=True)
        clean = clean and outcome.clean
    log.append("clean" if clean else "NOT CLEAN")
    print(log[-1])
    options.log.write_text("\n".join(log) + "\n", encoding="utf-8")
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
