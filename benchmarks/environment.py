"""What a measurement was made with: the GPU, the driver, the versions, the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupyfuse

PACKAGES = ("torch", "triton", "transformers", "timm", "numpy", "matplotlib")
_CHECKOUT = Path(__file__).resolve().parent.parent


def slug(name: str) -> str:
    """A device's name as a folder: 'NVIDIA H200' becomes 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The commit of this checkout, with '+' where tracked files were changed since; None outside a repository."""
    head = _output("git", "-C", str(_CHECKOUT), "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+" if _output("git", "-C", str(_CHECKOUT), "status", "--porcelain", "--untracked-files=no") else "")


def cuda_version(number: int) -> str:
    """CUDA's version number in words: 13000 is '13.0'."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # a version that cannot be told must not stop a measurement
        return None


def collect(cupy: Any, gpu: str) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a measurement on this machine."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": gpu,
        "driver": driver.splitlines()[0].strip() if driver else None,
        "driver_cuda": _ask(lambda: cuda_version(cupy.cuda.runtime.driverGetVersion())),
        "cuda_runtime": _ask(lambda: cuda_version(cupy.cuda.get_local_runtime_version())),
        "cupyfuse": cupyfuse.__version__,
        "cupy": cupy.__version__,
        **{package: version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
