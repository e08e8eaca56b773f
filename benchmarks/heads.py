"""The heads: a GEMM and the row operations after it, from `x` to the result; then the row operations alone."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupyfuse.heads
from cupyfuse.heads import oracle
from cupyfuse.heads.oracle import EPSILON
from cupyfuse.heads.plain import plain

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.api.fuse import Fused
from cupyfuse.settings import PRECISIONS

from .lab import Lab, run
from .options import DTYPES, add_shape
from .report import Case, Report
from .rivals import AUTOTUNED, BOUND, COMPILED, EAGER, OURS, Computation, Rival, device_copy
from .tables import ERROR, case_tables, explain

FIGURES = ("gpu_evicted", "gpu_back_to_back", "host")
TAIL_FIGURES = ("gpu_evicted", "gpu_back_to_back", "gpu_graph", "host")
DEFAULTS = {"budget": (0.25, 0.04)}  # GPU seconds for each rival and figure; quick ones

UNFUSED = "cupyfuse, unfused"  # head.__wrapped__: the same functions, each in a launch of its own
PLAIN = "CuPy"

# Name in the report, head, training.
CASES: tuple[tuple[str, Fused, bool], ...] = (
    ("head_logsumexp", cupyfuse.heads.head_logsumexp, False),
    ("head_sum", cupyfuse.heads.head_sum, False),
    ("head_softmax, inference", cupyfuse.heads.head_softmax, False),
    ("head_softmax, training", cupyfuse.heads.head_softmax, True),
)
_HOW = f"""\
{ERROR}, the worst of a case's results.
- *{BOUND}* had its weights folded and prepacked once by `bind`; *cupyfuse, unfused* is `head.__wrapped__`, the same
  functions called one after the other; *CuPy* are CuPy's own operations."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--precision", choices=PRECISIONS, default="highest", help="of products, torch's too")
    parser.add_argument("--max-autotune", action="store_true", help="torch.compile in this mode too (takes minutes)")


class Head:
    """One head, or what follows its product, on one set of arguments: how each rival runs it.

    `arguments` are by name, first what is not bound: ``x``, or ``y`` for what follows the product. `product` is
    ``x @ weight.T`` in float64.
    """

    def __init__(self, lab: Lab, head: Fused, arguments: Mapping[str, Any], product: Any, training: bool = False):
        self.lab, self._head, self._arguments = lab, head, arguments
        self._flags: dict[str, Any] = {"training": True} if training else {}
        doubles = {n: lab.as_double(a) for n, a in arguments.items() if n not in ("x", "y", "weight")}
        reference = oracle.evaluate_tail(head, product + doubles["bias"], doubles, training, lab.cupy)
        expected = [reference.result, *reference.statistics.values()]
        dtype = dtypes.name_of(next(iter(arguments.values())).dtype)
        self.computation = Computation(lab, expected, reference.result.shape, dtype)

    def _copy_state(self) -> tuple[dict[str, Any], Computation]:
        """Return arguments with running statistics of their own, and the computation that resets and compares them."""
        initial = {n: a for n, a in self._arguments.items() if n.startswith("running_")}
        values = {**self._arguments, **{name: array.copy() for name, array in initial.items()}}

        def reset() -> None:
            for name, array in initial.items():
                values[name][...] = array

        def state() -> list[Any]:
            return [self.lab.as_double(values[name]) for name in initial if self._flags]

        return values, dataclasses.replace(self.computation, reset=reset, state=state)

    def factories(self, max_autotune: bool) -> dict[str, Callable[[], Rival]]:
        by_torch = (EAGER, COMPILED, AUTOTUNED) if max_autotune else (EAGER, COMPILED)
        return {
            BOUND: self.bound,
            OURS: self._fused,
            UNFUSED: functools.partial(self._unfused, self._head.__wrapped__),
            PLAIN: functools.partial(self._unfused, plain(self._head, self.lab.cupy)),
            **{rival: functools.partial(self.by_torch, rival) for rival in by_torch},
        }

    def bound(self, function: Fused | None = None) -> Rival:
        """Return the head, or another function of its arguments, with all of them bound but the first."""
        values, computation = self._copy_state()
        x = values.pop(next(iter(values)))
        return computation.by_ours((function or self._head).bind(**values, **self._flags), x)

    def _fused(self) -> Rival:
        values, computation = self._copy_state()
        return computation.by_ours(self._head, *values.values(), *self._flags.values())

    def _unfused(self, function: Callable[..., Any]) -> Rival:
        values, computation = self._copy_state()
        return computation.by(functools.partial(function, **values, **self._flags))

    def by_torch(self, rival: str) -> Rival:
        values, computation = self._copy_state()
        x, torch = values.pop(next(iter(values))), self.lab.need_torch()
        module = torch.head(self._head.__wrapped__.__name__, values, bool(self._flags))
        return computation.by_torch(rival, module, x)


def whole(lab: Lab, arguments: Mapping[str, Any]) -> Iterator[tuple[Case, Head]]:
    """Yield a case for each head, from x to the result."""
    product = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
    shape, dtype = (*arguments["x"].shape, arguments["weight"].shape[0]), dtypes.name_of(arguments["x"].dtype)
    for name, head, training in CASES:
        lab.release()
        taken = {n: arguments[n] for n in cupyfuse.heads.input_shapes(head)}
        yield Case("The heads", name, shape, dtype), Head(lab, head, taken, product, training)


# The row operations alone -------------------------------------------------------------------------------------------


@cf.fuse
def tail_logsumexp(y: Any, bias: Any) -> Any:
    """Bias, logsumexp, LeakyReLU twice, GELU twice; from (B, N) to (B, 1)."""
    s = cf.logsumexp(y + bias, axis=1, keepdims=True)
    return cf.gelu(cf.gelu(cf.leaky_relu(cf.leaky_relu(s))))


@cf.fuse
def tail_softmax(y: Any, bias: Any, running_mean: Any, running_var: Any, gamma: Any, beta: Any, scale: Any) -> Any:
    """Bias, BatchNorm with running statistics, a scale, softmax; bound, the deviation and gamma are one factor."""
    return cf.softmax(scale * cf.batch_norm(y + bias, running_mean, running_var, gamma, beta), axis=1)


@cf.fuse
def tail_of_product(y: Any, factor: Any, shift: Any) -> Any:
    """Multiply-add a column, softmax: the least that a normalisation before a softmax takes."""
    return cf.softmax(y * factor + shift, axis=1)


def _reduction_alone(lab: Lab, y: Any, reduction: str) -> dict[str, Callable[[], Rival]]:
    """Return the libraries' own kernels of the tail's reduction: "logsumexp" or "softmax"."""
    function = getattr(lab.special, reduction)
    expected = function(lab.as_double(y), axis=1)
    computation = Computation(lab, [expected], expected.shape, dtypes.name_of(y.dtype))
    return {
        f"torch.{reduction} alone": lambda: computation.by_torch(EAGER, getattr(lab.need_torch(), reduction), y),
        f"cupyx {reduction} alone": lambda: computation.by(functools.partial(function, y, axis=1)),
    }


def _by_column(tail: Head, given: Mapping[str, Any], y: Any) -> Rival:
    """Return `tail_of_product`, bias, BatchNorm and scale made one factor and shift of each column, in float64."""
    doubles = {name: tail.lab.as_double(array) for name, array in given.items()}
    factor = doubles["scale"] * doubles["gamma"] / (doubles["running_var"] + EPSILON) ** 0.5
    shift = (doubles["bias"] - doubles["running_mean"]) * factor + doubles["beta"] * doubles["scale"]
    bound = tail_of_product.bind(factor=factor.astype(y.dtype), shift=shift.astype(y.dtype))
    return tail.computation.by_ours(bound, y)


def _tails(lab: Lab, arguments: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Case]:
    """Run what follows the product of the heads' arguments."""
    x, weight = arguments["x"], arguments["weight"]
    y = (x @ weight.T).astype(x.dtype, copy=False)
    for name, reduction, function, passes in (
        ("bias, logsumexp, LeakyReLU x 2, GELU x 2", "logsumexp", tail_logsumexp, 1),
        ("BatchNorm (inference), scale, softmax", "softmax", tail_softmax, 2),
    ):
        lab.release()
        head = cupyfuse.heads.find(reduction)
        given = {n: arguments[n] for n in cupyfuse.heads.input_shapes(head) if n not in ("x", "weight")}
        tail = Head(lab, head, {"y": y, **given}, lab.as_double(y))
        rivals = {OURS: functools.partial(tail.bound, function)}
        if reduction == "softmax":
            rivals[f"{OURS}, as within the head"] = functools.partial(_by_column, tail, given, y)
        rivals |= {rival: functools.partial(tail.by_torch, rival) for rival in (EAGER, COMPILED)}
        rivals |= _reduction_alone(lab, y, reduction)
        rivals["device copy"] = functools.partial(device_copy, lab, y, passes * y.nbytes)
        case = Case("After the GEMM", name, (int(y.shape[0]), int(y.shape[1])), options.dtype, int(passes * y.nbytes))
        yield run(lab, case, rivals, TAIL_FIGURES, options.budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the heads, then what follows their GEMM alone."""
    inputs = cupyfuse.heads.example_inputs("head_softmax", *options.shape, options.dtype, options.seed)
    arguments = {name: lab.cupy.asarray(value) for name, value in inputs.items()}
    for case, head in whole(lab, arguments):
        yield run(lab, case, head.factories(options.max_autotune), FIGURES, options.budget)
    yield from _tails(lab, arguments, options)


def report_lines(report: Report) -> list[str]:
    return [*explain(TAIL_FIGURES, _HOW), *case_tables(report, EAGER, ["gpu_back_to_back"])]
