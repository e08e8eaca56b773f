"""Describe what a measurement was made with: the device, the driver, the versions, the commit."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupyfuse
from cupyfuse.selftest.machine import cuda_version, package_version

PACKAGES = ("torch", "triton", "transformers", "timm", "numpy", "scipy")
_CHECKOUT = str(Path(__file__).resolve().parent.parent)


def slug(name: str) -> str:
    """Return a device's name as a folder: 'NVIDIA H200' becomes 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _run(*command: str) -> str:
    """Return what a command prints; nothing where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str | None:
    """Return the checkout's commit, with '+' where tracked files differ from it; None outside a repository."""
    head = _run("git", "-C", _CHECKOUT, "rev-parse", "HEAD")
    changed = head and _run("git", "-C", _CHECKOUT, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changed else ''}" if head else None


def _cuda(number: Callable[[], int]) -> str | None:
    """Return a version of CUDA; None where asking for it fails."""
    try:
        return cuda_version(number())
    except Exception:  # an unknown version must not stop a measurement
        return None


def collect(device: str, cupy: Any = None) -> dict[str, Any]:
    """Collect what a reader needs to judge or repeat a measurement on a device: a GPU with `cupy`, else the CPU."""
    found: dict[str, Any] = {"gpu": device, "cupyfuse": cupyfuse.__version__}
    if cupy is None:
        processor = re.search(r"Model name:\s*(.*)", _run("lscpu"))
        found["processor"] = processor[1] if processor else platform.processor() or None
    else:
        driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        found |= {"driver": driver[0].strip() if driver else None, "cupy": cupy.__version__}
        found["driver_cuda"] = _cuda(lambda: cupy.cuda.runtime.driverGetVersion())
        found["cuda_runtime"] = _cuda(lambda: cupy.cuda.get_local_runtime_version())
    found |= {package: package_version(package) for package in PACKAGES}
    found |= {"python": platform.python_version(), "commit": commit()}
    return {**found, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
