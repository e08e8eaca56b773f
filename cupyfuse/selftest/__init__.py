"""Self-test: compare every operator, reduction and head on this machine with exact results.

`tables.py` and `pairs.py` hold the results for special values, the operator tables the accuracy that is required;
NumPy's functions say what operators give of integers.
Everything runs through the public functions; on a GPU in every kernel template, vectorised and scalar, in all dtypes.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import __version__
from ..cuda.compile import cubin
from ..errors import EngineError
from . import chains, integers, machine, pointwise, reductions
from .formats import FORMATS, available
from .progress import Progress
from .report import Report, write_page
from .target import Failure, Target

__all__ = ["Report", "run", "write_page"]

# Without a GPU, kernels are compiled for this architecture.
_ARCHITECTURE = "sm_90"
_TRIVIAL = 'extern "C" __global__ void nothing() {}'


def run(xp: Any, quick: bool = False) -> Report:
    """Run all checks, with progress on standard error.

    Parameters
    ----------
    xp : module
        NumPy, or CuPy to run kernels on its current GPU.
    quick : bool
        Leave out most compilation, which takes longest: without a GPU compile no kernels, on a GPU run float32 and
        int64 alone.

    Returns
    -------
    Report
    """
    begun = time.perf_counter()
    facts, _ = machine.describe(__version__)
    target = Target(xp, collecting=xp is np and not quick and not _missing_nvrtc())
    report = Report(facts, _engine_sentence(xp, quick))
    formats = [form for form in available() if xp is np or not quick or form.name == "float32"]
    with Progress(3 * len(formats) + 1 + target.collecting) as progress:
        for form in formats:
            progress.stage(f"special values in {form.name}")
            report.special[form.name] = pointwise.check_specials(target, form) + reductions.check_specials(target, form)
            progress.stage(f"accuracy of operators in {form.name}")
            report.operators[form.name] = pointwise.accuracy(target, form)
            progress.stage(f"accuracy of reductions, products and heads in {form.name}")
            report.chains[form.name] = chains.accuracy(target, form)
        progress.stage("integers")
        for form in integers.FORMATS if xp is np or not quick else integers.FORMATS[-1:]:
            report.integers[form.name] = integers.check(target, form)
        if target.collecting:
            progress.stage(f"compiling {len(target.kernels)} kernels for {_ARCHITECTURE}")
            _compile(target)
    report.kernels, report.kernels_title = list(target.kernels.values()), _kernels_title(target, quick)
    report.failures, report.seconds = target.failures, time.perf_counter() - begun
    return report


def _engine_sentence(xp: Any, quick: bool) -> str:
    """Say which engine runs, on which device, and which formats are left out."""
    ran = f"The CUDA engine ran: {machine.device_name(xp)}."
    if xp is np:
        ran = f"The NumPy engine ran, {machine.device_name(np)}. No kernel ran."
    missing = set(FORMATS) - {form.name for form in available()}
    if quick and xp is not np:
        return f"{ran} A quick run: float32 and int64 alone."
    # Of all formats only bfloat16 may be missing.
    return ran + "".join(f" {name} was not tested: pip install ml_dtypes." for name in missing)


def _missing_nvrtc() -> str:
    """Return why kernels cannot be compiled without a GPU, or an empty string."""
    try:
        cubin(_TRIVIAL, _ARCHITECTURE)
    except Exception as error:  # partly installed wheels fail in many ways
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _compile(target: Target) -> None:
    """Compile the kernels that a target has collected; those that do not compile are failures."""
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    waiting = [(pool.submit(cubin, source, _ARCHITECTURE), kernel) for (source, _), kernel in target.kernels.items()]
    try:
        for done, kernel in waiting:
            try:
                done.result()
            except EngineError as error:
                given = f"compiling it for {_ARCHITECTURE}"
                target.failures.append(Failure(kernel.template, kernel.dtype, given, str(error), "machine code"))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, hundreds of kernels may still wait


def _kernels_title(target: Target, quick: bool = False) -> str:
    """Write the heading of the list of kernels: whether they ran, were compiled, or neither."""
    count = len(target.kernels)
    if target.on_gpu:
        return f"{count} different kernels were compiled and ran, beside {target.products} products and copies:"
    if target.collecting:
        return f"No kernel ran: the {count} that a GPU would have run were compiled for {_ARCHITECTURE}:"
    return f"No kernel ran, and none was compiled: {'the run was quick' if quick else _missing_nvrtc()}."
