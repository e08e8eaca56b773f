"""Run a case of a benchmark: its rivals compute the same, are checked against float64, then timed in turn."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyfuse

from .device import Call, Device, Host
from .report import Case, Result
from .rivals import Rival, Unavailable
from .timing import Contest, Summary, describe

POISON = 0xFF  # every byte so: NaN in all float formats, and none that arithmetic gives

# The error at which a result is wrong rather than rounded: ||result - reference|| / ||reference||. Coarse, since the
# errors themselves are reported: TF32 has 3e-4, bfloat16 operands 3e-3, and a sum that cancels some times that.
WRONG = {"highest": 1e-3, "high": 2e-2, "medium": 5e-2, "ieee": 1e-3, "tf32": 2e-2}
WRONG_16_BIT = 5e-2
_TORCH_PRECISIONS = {"ieee": "highest", "tf32": "high"}  # the others have torch's names


@dataclass
class Lab:
    """What every case needs: the device and the libraries."""

    device: Device | Host
    cupy: Any  # or NumPy
    special: Any  # cupyx.scipy.special
    torch: ModuleType | None  # `benchmarks.pytorch`
    torch_missing: str  # why there is none
    precision: str = "highest"
    compile_missing: str = ""  # why torch.compile does not take part

    def need_torch(self, compiling: bool = False) -> Any:
        """Return `benchmarks.pytorch`; raise `Unavailable` without PyTorch or, if needed, torch.compile."""
        if self.torch is None or (compiling and self.compile_missing):
            raise Unavailable(self.torch_missing if self.torch is None else self.compile_missing)
        return self.torch

    def as_double(self, array: Any) -> Any:
        """Convert to float64; 16-bit floats by way of float32."""
        return (array.astype("float32") if array.dtype.itemsize == 2 else array).astype("float64")

    def allocate_poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new array, every byte of it poison."""
        array = self.cupy.empty(shape, dtype)
        array.view("uint8")[...] = POISON
        return array

    def poison_pool(self, size: int) -> None:
        """Leave a block of poison in CuPy's memory pool, for the next array of that many bytes."""
        self.allocate_poisoned((size,), "uint8")

    def count_unwritten(self, array: Any) -> int:
        """Count the elements of a poisoned array that were not written."""
        bits = array.view(f"uint{8 * array.dtype.itemsize}")
        return int((bits == bits.dtype.type(2 ** (8 * array.dtype.itemsize) - 1)).sum())

    def release(self) -> None:
        """Return unused memory to the driver, so that the next case starts with all of it."""
        if self.torch is not None:
            self.torch.release()
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def error_limit(self, dtype: str) -> float:
        return WRONG_16_BIT if dtype in ("float16", "bfloat16") else WRONG[self.precision]


@contextlib.contextmanager
def open_lab(precision: str, with_torch: bool, with_compiler: bool) -> Iterator[Lab]:
    """Open the GPU and the libraries; raise `NoGpu` without."""
    device = Device()
    import cupy
    from cupyx.scipy import special

    with contextlib.ExitStack() as stack:
        torch: ModuleType | None = None
        missing = "left out on request"
        if with_torch:
            try:
                from . import pytorch

                named = _TORCH_PRECISIONS.get(precision, precision)
                stack.enter_context(pytorch.session(cupy.cuda.get_current_stream().ptr, named))
                torch = pytorch
            except ModuleNotFoundError as error:
                missing = "not installed" if error.name == "torch" else describe(error)
            except Exception as error:
                missing = describe(error)
        stack.enter_context(cupyfuse.precision(precision))
        yield Lab(device, cupy, special, torch, missing, precision, "" if with_compiler else "left out on request")


def cpu_lab() -> contextlib.AbstractContextManager[Lab]:
    """Return a laboratory with NumPy on the CPU, for benchmarks that need neither SciPy nor PyTorch."""
    return contextlib.nullcontext(Lab(Host(), np, None, None, "left out"))


def measure_errors(rival: Rival) -> tuple[float | None, float | None]:
    """Return the worst errors of all attempts, by norm and by element; None where none was taken, NaN before all."""
    norms: list[float] = []
    elements: list[float] = []
    for attempt in rival.attempts:
        for place, (result, expected) in enumerate(zip(attempt(), rival.expected, strict=True)):
            if tuple(result.shape) != tuple(expected.shape):
                raise RuntimeError(f"the result has shape {tuple(result.shape)}, expected {tuple(expected.shape)}")
            difference = result - expected
            size = float((expected * expected).sum()) or 1.0  # beside zeros the error is absolute
            norms.append((float((difference * difference).sum()) / size) ** 0.5)
            if rival.sizes:
                elements.append(float((abs(difference) / rival.sizes[place]).max()))

    def worst(errors: Sequence[float]) -> float | None:
        return next((e for e in errors if math.isnan(e)), max(errors)) if errors else None

    return worst(norms), worst(elements)


def _check(rival: Rival, result: Result, limit: float) -> None:
    """Enter a rival's errors into its result, and the failure where they are too large."""
    errors = measure_errors(rival)
    result.error, result.max_error = (e if e is None or math.isfinite(e) else None for e in errors)
    decisive = errors[1] if rival.sizes else errors[0]
    if decisive is not None and rival.judged and not (decisive <= limit and math.isfinite(decisive)):
        result.failure = f"wrong result: {'max' if rival.sizes else 'relative'} error {decisive:.3g}"


def run(
    lab: Lab, case: Case, factories: Mapping[str, Callable[[], Rival]], figures: Sequence[str], budget: float
) -> Case:
    """Make, check and time the rivals of a case, for `budget` seconds each and figure; enter their results into it.

    A rival that cannot be made, is wrong or raises is reported with the reason.
    """
    began = time.perf_counter()
    rivals: dict[str, Rival] = {}
    for name, make in factories.items():
        result = Result(name)
        case.results.append(result)
        try:
            rival = make()
            _check(rival, result, lab.error_limit(case.dtype) if rival.limit is None else rival.limit)
            rivals |= {} if result.failure else {name: rival}
        except Unavailable as reason:
            result.failure = str(reason)
        except Exception as error:
            result.failure = describe(error)
    results = {result.rival: result for result in case.results}
    before = {name: rival.before for name, rival in rivals.items() if rival.before}
    contest = Contest(lab.device, {name: rival.call for name, rival in rivals.items()}, budget, before)
    for figure in figures:
        if figure == "gpu_graph":
            captures = {n: r.capture for n, r in rivals.items() if r.capture and n not in contest.failures}
            measured, missing = _replay(lab, captures)
            for name, reason in missing.items():
                results[name].missing[figure] = reason
        else:
            measured = contest.measure(figure)
        for name, summary in measured.items():
            results[name].times[figure] = summary
    for name, reason in contest.failures.items():
        results[name].failure = reason
    print(f"{case.group}: {case.name}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return case


def _replay(lab: Lab, captures: Mapping[str, Callable[[], Call]]) -> tuple[dict[str, Summary], dict[str, str]]:
    """Capture calls in CUDA graphs and time these; return times, and by rival why there are none."""
    replays, missing = {}, {}
    for name, capture in captures.items():
        try:
            replays[name] = capture()
        except Exception as error:
            missing[name] = describe(error)
    contest = Contest(lab.device, replays, budget=0.0)
    return contest.measure("gpu_graph"), {**missing, **contest.failures}
