"""Run a case of a benchmark: its rivals compute the same, are checked against float64, then timed in turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cupyfuse import dtypes

from .device import Call, Device
from .report import Case, Result
from .timing import Contest, describe

# The names of rivals in several reports.
BOUND, FUSED, EAGER = "cupyfuse, bound", "cupyfuse", "torch eager"
COMPILED, AUTOTUNED = "torch.compile", "torch.compile, max-autotune"

POISON = 0xFF  # every byte so: NaN in all float formats, and none that arithmetic gives

# The error at which a result is wrong rather than rounded: ||result - reference|| / ||reference||. Coarse, since the
# errors themselves are reported: TF32 has 3e-4, bfloat16 operands 3e-3, and a sum that cancels some times that.
WRONG = {"highest": 1e-3, "high": 2e-2, "medium": 5e-2, "ieee": 1e-3, "tf32": 2e-2}
WRONG_16_BIT = 5e-2
_TORCH_PRECISIONS = {"ieee": "highest", "tf32": "high"}  # the others have torch's names

# Pick what is compared of a call's result, given also what converts an array to float64.
Sample = Callable[[Any, Callable[[Any], Any]], list[Any]]


class Unavailable(Exception):
    """A rival cannot take part; the message is what the report says."""


@dataclass
class Rival:
    """One way to compute a case."""

    call: Call  # what is timed
    attempts: Sequence[Callable[[], list[Any]]]  # compute once from fresh state into poisoned memory; return float64
    expected: Sequence[Any]  # what attempts should return
    capture: Callable[[], Call] | None = None  # captures the call in a CUDA graph and returns its launch
    sizes: Sequence[Any] = ()  # beside `expected`: what the error of each element is relative to
    limit: float | None = None  # of errors that are not wrong, by element where there are `sizes`, else by norm
    before: Call | None = None  # run untimed before each call that is timed by itself


@dataclass
class Lab:
    """What every case needs: the GPU and the libraries."""

    device: Device
    cupy: Any
    special: Any  # cupyx.scipy.special
    torch: ModuleType | None  # `benchmarks.rivals`
    torch_missing: str  # why there is none
    precision: str = "highest"
    compile_missing: str = ""  # why torch.compile does not take part

    def need_torch(self, compiling: bool = False) -> Any:
        """Return `benchmarks.rivals`; raise `Unavailable` without PyTorch or, if needed, torch.compile."""
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
            self.torch.reset_compiler()
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if self.torch is not None:
            self.torch.release()

    def error_limit(self, dtype: str) -> float:
        return WRONG_16_BIT if dtype in ("float16", "bfloat16") else WRONG[self.precision]

    # Rivals
    def rival(
        self,
        call: Call,
        expected: Sequence[Any],
        size: int,
        sample: Sample | None = None,
        reset: Call = lambda: None,
        torch: Any = None,
        **more: Any,
    ) -> Rival:
        """Return a rival whose calls return a new array of `size` bytes or, with `torch`, a tensor.

        `sample` picks what is compared, `reset` restores the state that calls change.
        """

        def double(result: Any) -> Any:
            return torch.as_double(result, self.cupy) if torch else self.as_double(result)

        def attempt() -> list[Any]:
            reset()
            (torch.poison if torch else self.poison_pool)(size)
            result = call()
            return sample(result, double) if sample else [double(result)]

        return Rival(call, [attempt], expected, **more)

    def fused_rival(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        expected: Sequence[Any],
        shape: tuple[int, ...],
        dtype: str,
        sample: Sample | None = None,
        reset: Call = lambda: None,
        **more: Any,
    ) -> Rival:
        """Return a cupyfuse function as a rival, checked with an array given as `out` and with one of its own."""
        stored = dtypes.to_numpy(dtype)

        def given() -> list[Any]:
            reset()
            target = self.allocate_poisoned(shape, stored)
            function(*arguments, out=target)
            missing = self.count_unwritten(target)
            if missing:
                raise RuntimeError(f"{missing} of {target.size} elements of out were not written")
            return sample(target, self.as_double) if sample else [self.as_double(target)]

        size = stored.itemsize * math.prod(shape)
        rival = self.rival(functools.partial(function, *arguments), expected, size, sample, reset, **more)
        rival.attempts = [given, *rival.attempts]
        return rival

    def device_copy(self, source: Any, moved: int) -> Rival:
        """Return a copy that reads half of `moved` bytes and writes as many: the memory's bandwidth."""
        flat = source.reshape(-1)[: moved // 2 // source.dtype.itemsize]
        target = self.allocate_poisoned(flat.shape, flat.dtype)

        call = functools.partial(self.device.copy, target, flat)

        def attempt() -> list[Any]:
            call()
            return [self.as_double(target[-4096:])]

        expected = [self.as_double(flat[-4096:])]
        return Rival(call, [attempt], expected, functools.partial(self.device.capture, call))


@contextlib.contextmanager
def open_lab(precision: str, with_torch: bool, with_compiler: bool) -> Iterator[Lab]:
    """Open the GPU and the libraries; raise `NoGpu` without."""
    import cupyfuse

    device = Device()
    import cupy
    from cupyx.scipy import special

    with contextlib.ExitStack() as stack:
        torch: ModuleType | None = None
        missing = "left out on request"
        if with_torch:
            try:
                from . import rivals

                named = _TORCH_PRECISIONS.get(precision, precision)
                stack.enter_context(rivals.session(cupy.cuda.get_current_stream().ptr, named))
                torch = rivals
            except ModuleNotFoundError as error:
                missing = "not installed" if error.name == "torch" else describe(error)
            except Exception as error:
                missing = describe(error)
        stack.enter_context(cupyfuse.precision(precision))
        yield Lab(device, cupy, special, torch, missing, precision, "" if with_compiler else "left out on request")


def measure_errors(rival: Rival) -> tuple[float | None, float | None]:
    """Return the worst errors of all attempts, by norm and by element; None where none was taken, NaN before all."""
    norms: list[float] = []
    elements: list[float] = []
    for attempt in rival.attempts:
        for place, (result, expected) in enumerate(zip(attempt(), rival.expected, strict=True)):
            if tuple(result.shape) != tuple(expected.shape):
                raise RuntimeError(f"the result has shape {tuple(result.shape)}, expected {tuple(expected.shape)}")
            difference = result - expected
            norms.append(float((difference * difference).sum() / (expected * expected).sum()) ** 0.5)
            if rival.sizes:
                elements.append(float((abs(difference) / rival.sizes[place]).max()))

    def worst(errors: Sequence[float]) -> float | None:
        return next((e for e in errors if math.isnan(e)), max(errors)) if errors else None

    return worst(norms), worst(elements)


def _check(lab: Lab, case: Case, rival: Rival, result: Result) -> bool:
    """Enter a rival's errors into its result; tell whether it is right."""
    errors = measure_errors(rival)
    result.error, result.max_error = (e if e is None or math.isfinite(e) else None for e in errors)
    decisive = errors[1] if rival.sizes else errors[0]
    limit = lab.error_limit(case.dtype) if rival.limit is None else rival.limit
    if decisive is None or (decisive <= limit and math.isfinite(decisive)):
        return True
    result.failure = f"wrong result: {'max' if rival.sizes else 'relative'} error {decisive:.3g}"
    return False


def run(
    lab: Lab, case: Case, factories: Mapping[str, Callable[[], Rival]], figures: Sequence[str], budget: float
) -> Case:
    """Make, check and time the rivals of a case, for `budget` GPU seconds each and figure; enter their results into it.

    A rival that cannot be made, is wrong or raises is reported with the reason.
    """
    began = time.perf_counter()
    rivals: dict[str, Rival] = {}
    for name, make in factories.items():
        result = Result(name)
        case.results.append(result)
        try:
            rival = make()
            if _check(lab, case, rival, result):
                rivals[name] = rival
        except Unavailable as reason:
            result.failure = str(reason)
        except Exception as error:
            result.failure = describe(error)
    _time(lab, case, rivals, figures, budget)
    print(f"{case.group}: {case.name}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return case


def _time(lab: Lab, case: Case, rivals: Mapping[str, Rival], figures: Sequence[str], budget: float) -> None:
    before = {name: rival.before for name, rival in rivals.items() if rival.before}
    contest = Contest(lab.device, {name: rival.call for name, rival in rivals.items()}, budget, before)
    results = {result.rival: result for result in case.results}
    for figure in figures:
        if figure == "gpu_graph":
            replays: dict[str, Call] = {}
            for name, rival in rivals.items():
                if rival.capture is None or name in contest.failures:
                    continue
                try:
                    replays[name] = rival.capture()
                except Exception as error:
                    results[name].missing[figure] = describe(error)
            measured, failed = contest.replayed(replays)
            for name, reason in failed.items():
                results[name].missing[figure] = reason
        else:
            measured = getattr(contest, figure.removeprefix("gpu_"))()
        for name, summary in measured.items():
            results[name].times[figure] = summary
    for name, reason in contest.failures.items():
        results[name].failure = reason
