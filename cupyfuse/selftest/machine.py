"""Describe this machine: versions, GPUs, the kernel cache, and how to install what is missing; find its arrays."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..cuda import launcher
from ..cuda.compile import cache_folder
from ..plan.report import quantity

_CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_OLDEST_CUPY = (14, 2)
# The CUDA driver's library by platform: loaded directly, to find the driver without CuPy.
_DRIVER_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> int:
    """Return the newest CUDA version that the driver runs, 12090 for 12.9; 0 without a driver."""
    for name in _DRIVER_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    return 0


def cuda_version(number: int) -> str:
    """Format a version of CUDA: 12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _describe_folder(path: Path) -> str:
    """Describe a folder by its path and the number and size of its files."""
    if not path.is_dir():
        return f"{path} (does not exist yet)"
    sizes = [entry.stat().st_size for entry in path.iterdir() if entry.is_file()]
    return f"{path} ({len(sizes)} files, {quantity(sum(sizes), 'B')})"


def _answer_or_error(question: Callable[[], str]) -> str:
    """Return what a library or the file system answers, or its error: broken installations are to be reported."""
    try:
        return question()
    except Exception as error:
        return f"not available: {_reason(error)}"


def _reason(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _import_cupy() -> tuple[Any, str]:
    """Return CuPy and "", or None and why it cannot be imported."""
    try:
        import cupy
    except Exception as error:  # without its libraries CuPy raises more than ImportError
        return None, _reason(error)
    return cupy, ""


def _gpus(cupy: Any) -> list[tuple[str, str]]:
    """List the GPUs as facts: (name, description)."""
    lines = []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        memory = quantity(properties["totalGlobalMem"], "B")
        capability = f"{properties['major']}.{properties['minor']}"
        lines.append((f"GPU {number}", f"{properties['name'].decode()}, {memory}, compute capability {capability}"))
    return lines


def describe(version: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return facts as (name, value), and missing parts as (part, command that installs it)."""
    driver = driver_version()
    facts = [
        ("cupyfuse", version),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("NumPy", np.__version__),
    ]
    missing: list[tuple[str, str]] = []
    _describe_cupy(driver, facts, missing)
    _describe_optional_packages(facts, missing)
    facts.append(("launches", _answer_or_error(launcher.describe)))
    facts.append(("kernel cache", _answer_or_error(lambda: _describe_folder(cache_folder()))))
    return facts, missing


def _describe_cupy(driver: int, facts: list[tuple[str, str]], missing: list[tuple[str, str]]) -> None:
    """Add the facts on CuPy, the driver and CUDA, and which of them are missing."""
    wheels = {name: found for name in _CUPY_WHEELS if (found := package_version(name))}
    facts.append(("CuPy", ", ".join(f"{found} ({name})" for name, found in wheels.items()) or "not installed"))
    facts.append(("CUDA driver", f"runs CUDA up to {cuda_version(driver)}" if driver else "none found"))
    extra = "cu13" if driver >= 13000 else "cu12"
    cupy, broken = _import_cupy() if wheels else (None, "")
    if not driver:
        missing.append(("an NVIDIA driver, so the NumPy engine runs", "https://www.nvidia.com/drivers"))
    if not wheels:
        missing.append(("CuPy, which the CUDA engine needs", f'pip install "cupyfuse[{extra}]"'))
    elif cupy is None:
        repair = f'pip install --force-reinstall "cupyfuse[{extra}]"'
        missing.append((f"a CuPy that can be imported ({broken})", repair))
    else:
        if len(wheels) > 1:
            missing.append(("one CuPy instead of several", f"pip uninstall {' '.join(list(wheels)[1:])}"))
        _describe_cuda(cupy, driver, extra, facts, missing)


def _describe_optional_packages(facts: list[tuple[str, str]], missing: list[tuple[str, str]]) -> None:
    """Add the versions of the packages that cupyfuse can do without."""
    for name, what, command in (
        ("ml_dtypes", "bfloat16 arrays", "pip install ml_dtypes"),
        ("rich", "the progress bar", 'pip install "cupyfuse[cli]"'),
        ("torch", "PyTorch tensors", 'pip install "cupyfuse[torch]"'),
        ("cupyfuse-launcher", "launches that take the host less time", "pip install ./launcher, in a checkout"),
    ):
        found = package_version(name)
        facts.append((name, found or "not installed"))
        if found is None:
            missing.append((f"{name}, for {what} (optional)", command))


def _describe_cuda(
    cupy: Any, driver: int, extra: str, facts: list[tuple[str, str]], missing: list[tuple[str, str]]
) -> None:
    """Append the facts about CuPy's CUDA libraries and the GPUs, and what is missing of them."""
    if tuple(int(part) for part in cupy.__version__.split(".")[:2]) < _OLDEST_CUPY:
        missing.append(("CuPy 14.2 or newer", f'pip install --upgrade "cupyfuse[{extra}]"'))
    facts.append(("CUDA runtime", _answer_or_error(lambda: cuda_version(cupy.cuda.runtime.runtimeGetVersion()))))
    nvrtc = _answer_or_error(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion())))
    facts.append(("NVRTC", nvrtc))
    if nvrtc.startswith("not available"):
        missing.append(("NVRTC, which compiles the kernels", f'pip install "cupyfuse[{extra}]"'))
    if not driver:
        return
    try:
        gpus = _gpus(cupy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        facts.append(("GPU", f"none usable: {error}"))
        missing.append(("a GPU that the driver can use", "nvidia-smi"))
        return
    facts.extend(gpus or [("GPU", "none visible")])
    if not gpus:
        missing.append(("a visible GPU", "nvidia-smi (see also CUDA_VISIBLE_DEVICES)"))


def array_module(engine: str) -> Any:
    """Return the array library of an engine: NumPy or CuPy; "auto" is CuPy if it finds a GPU.

    Raises
    ------
    ValueError
        There is no GPU, or no CuPy, for "cuda".
    """
    if engine == "numpy":
        return np
    try:
        import cupy
    except ImportError:
        if engine == "auto":
            return np
        raise ValueError("engine 'cuda' needs CuPy: pip install 'cupyfuse[cu12]' (or [cu13])") from None
    if cupy.cuda.is_available():
        return cupy
    if engine == "auto":
        return np
    raise ValueError("engine 'cuda' needs an NVIDIA GPU, and CuPy finds none; 'python -m cupyfuse info' says more")


def device_name(xp: Any) -> str:
    """Name an array library with its version, and the device that it computes on."""
    if xp is np:
        return f"NumPy {np.__version__} on {platform.processor() or platform.machine()}"
    name = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()
    return f"CuPy {xp.__version__} on {name}"


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Copy a CuPy array to NumPy; pass NumPy arrays on."""
    return array if isinstance(array, np.ndarray) else array.get()
