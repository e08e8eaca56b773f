"""One case of a benchmark: rivals that compute the same, checked against float64, then timed in turn."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from cupyfuse import dtypes

from .device import Call, Device
from .plain import Plain
from .report import Case, Result
from .timing import Contest, describe

POISON = 0xFF  # every byte so: NaN in all float formats, and none that arithmetic gives

# The error at which a result is no rounded one but a wrong one: ||result - reference|| / ||reference||. Coarse, since
# the errors themselves are reported: TF32 has 3e-4, bfloat16 operands 3e-3, and a sum that cancels some times that.
WRONG = {"highest": 1e-3, "high": 2e-2, "medium": 5e-2, "ieee": 1e-3, "tf32": 2e-2}
_TORCH_PRECISIONS = {"ieee": "highest", "tf32": "high"}  # the others are called the same
WRONG_16_BIT = 5e-2


class Unavailable(Exception):
    """A rival that cannot take part; the message is what the report says."""


@dataclass
class Rival:
    """One way to compute a case.

    Attributes
    ----------
    call : callable
        What is timed.
    attempts : sequence of callable
        Each computes once, from fresh state and into poisoned memory, and gives the results as float64 arrays.
    expected : sequence of array
        What they should be.
    capture : callable, optional
        Captures the call in a CUDA graph and gives what replays it.
    sizes : sequence of array
        Beside `expected`, what the error of each element is relative to; positive. Empty where that is not taken.
    limit : float, optional
        The largest error, relative to `sizes`, of a result that is not wrong; without it, the lab's for the norms.
    before : callable, optional
        What to do before each call that is timed by itself, without being timed.
    """

    call: Call
    attempts: Sequence[Callable[[], list[Any]]]
    expected: Sequence[Any]
    capture: Callable[[], Call] | None = None
    sizes: Sequence[Any] = ()
    limit: float | None = None
    before: Call | None = None


@dataclass
class Lab:
    """What every case needs: the GPU, the libraries, the options.

    Attributes
    ----------
    torch : module or None
        `benchmarks.rivals`, with PyTorch ready to run; where None, `torch_missing` says why.
    compiling : str
        Why torch.compile does not take part; empty where it does.
    """

    device: Device
    cupy: Any
    special: Any
    torch: ModuleType | None
    torch_missing: str
    precision: str = "highest"
    compiling: str = ""
    plain: Plain = field(init=False)

    def __post_init__(self) -> None:
        self.plain = Plain(self.cupy, self.special)

    def need_torch(self) -> Any:
        if self.torch is None:
            raise Unavailable(self.torch_missing)
        return self.torch

    def need_compiler(self) -> Any:
        torch = self.need_torch()
        if self.compiling:
            raise Unavailable(self.compiling)
        return torch

    def as_double(self, array: Any) -> Any:
        """A float64 copy; 16-bit floats by way of float32."""
        return (array.astype("float32") if array.dtype.itemsize == 2 else array).astype("float64")

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array, every byte of it poison."""
        array = self.cupy.empty(shape, dtype)
        array.view("uint8")[...] = POISON
        return array

    def poison_pool(self, size: int) -> None:
        """Leave a block of poison in CuPy's memory pool, for the next array of that many bytes."""
        self.poisoned((size,), "uint8")

    def unwritten(self, array: Any) -> int:
        """How many elements of a poisoned array were not written."""
        bits = array.view(f"uint{8 * array.dtype.itemsize}")
        return int((bits == bits.dtype.type(2 ** (8 * array.dtype.itemsize) - 1)).sum())

    def release(self) -> None:
        """Give unused memory back, so that the next case starts with all of it."""
        if self.torch is not None:
            self.torch.forget()
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()
        if self.torch is not None:
            self.torch.release()

    def limit(self, dtype: str) -> float:
        return WRONG_16_BIT if dtype in ("float16", "bfloat16") else WRONG[self.precision]

    def fused_attempts(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        out: tuple[tuple[int, ...], str],
        results: Callable[[Any], list[Any]] | None = None,
        reset: Callable[[], None] = lambda: None,
    ) -> list[Callable[[], list[Any]]]:
        """Attempts of a cupyfuse function: into an array given as `out`, and into one of its own."""
        shape, dtype = out
        convert = results or (lambda array: [self.as_double(array)])
        stored = dtypes.to_numpy(dtype)

        def given() -> list[Any]:
            reset()
            target = self.poisoned(shape, stored)
            function(*args, out=target)
            missing = self.unwritten(target)
            if missing:
                raise RuntimeError(f"{missing} of {target.size} elements of out were not written")
            return convert(target)

        def own() -> list[Any]:
            reset()
            self.poison_pool(stored.itemsize * math.prod(shape))
            return convert(function(*args))

        return [given, own]


@contextlib.contextmanager
def laboratory(precision: str, with_torch: bool, with_compiler: bool) -> Iterator[Lab]:
    """Open the GPU and the libraries.

    Raises
    ------
    NoGpu
        CuPy or a GPU is missing.
    """
    import cupyfuse

    device = Device()
    import cupy
    from cupyx.scipy import special

    compiling = "" if with_compiler else "left out on request"
    with contextlib.ExitStack() as stack:
        torch: ModuleType | None = None
        missing = "left out on request"
        if with_torch:
            try:
                from . import rivals

                meaning = _TORCH_PRECISIONS.get(precision, precision)
                stack.enter_context(rivals.session(cupy.cuda.get_current_stream().ptr, meaning))
                torch = rivals
            except ModuleNotFoundError as error:
                missing = "not installed" if error.name == "torch" else describe(error)
            except Exception as error:
                missing = describe(error)
        stack.enter_context(cupyfuse.precision(precision))
        yield Lab(device, cupy, special, torch, missing, precision, compiling)


def _worst(errors: Sequence[float]) -> float | None:
    return next((e for e in errors if math.isnan(e)), max(errors)) if errors else None


def errors_of(rival: Rival) -> tuple[float | None, float | None]:
    """The worst errors of all attempts; None where none was taken.

    The first is ||result - expected|| / ||expected||, the second the largest |result - expected| / size of an element.
    """
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
    return _worst(norms), _worst(elements)


def _enter(result: Result, errors: tuple[float | None, float | None], limit: float, by_element: bool) -> bool:
    """Enter the errors of a rival into its result; whether what it computes is right."""
    result.error, result.max_error = (e if e is None or math.isfinite(e) else None for e in errors)
    decisive = errors[1] if by_element else errors[0]
    if decisive is None or decisive <= limit:
        return True
    result.failure = f"wrong result: {'max' if by_element else 'relative'} error {decisive:.3g}"
    return False


def run(
    lab: Lab, case: Case, factories: Mapping[str, Callable[[], Rival]], figures: Sequence[str], budget: float
) -> Case:
    """Check and time the rivals of a case, and enter their results into it.

    Parameters
    ----------
    lab : Lab
    case : Case
        Without results yet.
    factories : mapping of str to callable
        What makes each rival, by name; one that cannot be made is reported.
    figures : sequence of str
        Which of "gpu_evicted", "gpu_back_to_back", "host", "wall" and "gpu_graph" to take.
    budget : float
        GPU seconds for each rival and figure.
    """
    began = time.perf_counter()
    rivals: dict[str, Rival] = {}
    for name, factory in factories.items():
        result = Result(name)
        case.results.append(result)
        try:
            rival = factory()
            errors = errors_of(rival)
        except Unavailable as reason:
            result.failure = str(reason)
        except Exception as error:
            result.failure = describe(error)
        else:
            limit = lab.limit(case.dtype) if rival.limit is None else rival.limit
            if _enter(result, errors, limit, rival.limit is not None):
                rivals[name] = rival
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
            taken, failed = contest.replayed(replays)
            for name, reason in failed.items():
                results[name].missing[figure] = reason
        else:
            taken = getattr(contest, figure.removeprefix("gpu_"))()
        for name, summary in taken.items():
            results[name].times[figure] = summary
    for name, reason in contest.failures.items():
        results[name].failure = reason
