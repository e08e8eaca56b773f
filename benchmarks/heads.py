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
from .options import DTYPES, shape
from .report import Case, Report
from .rivals import AUTOTUNED, BOUND, COMPILED, EAGER, OURS, Computation, Rival, device_copy
from .tables import ERROR, case_tables, explain

FIGURES = ("gpu_evicted", "gpu_back_to_back", "host")
TAIL_FIGURES = ("gpu_evicted", "gpu_back_to_back", "gpu_graph", "host")
DEFAULTS = {"budget": (0.25, 0.04)}  # GPU seconds for each rival and figure; quick ones
SHAPE = (cupyfuse.heads.ROWS, cupyfuse.heads.IN_FEATURES, cupyfuse.heads.OUT_FEATURES)

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
    parser.add_argument("--shape", type=shape, default=SHAPE, metavar="BxKxN", help="1024x8192x8192")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="of float32 matrix products, torch's too"
    )
    parser.add_argument("--max-autotune", action="store_true", help="torch.compile in this mode too (takes minutes)")


Factories = dict[str, Callable[[], Rival]]  # by the rival's name in the report


class Head:
    """One head on one set of arguments, and how each rival runs it; `product` is ``x @ weight.T`` in float64."""

    def __init__(self, lab: Lab, head: Fused, training: bool, arguments: Mapping[str, Any], product: Any):
        self._head, self._name = head, head.__wrapped__.__name__
        self._arguments = {name: arguments[name] for name in cupyfuse.heads.input_shapes(head)}
        self._flags: dict[str, Any] = {"training": True} if training else {}
        doubles = {n: lab.as_double(a) for n, a in self._arguments.items() if n not in ("x", "weight")}
        reference = oracle.evaluate_tail(head, product + doubles["bias"], doubles, training, lab.cupy)
        expected = [reference.result, *reference.statistics.values()]
        self._computation = Computation(lab, expected, reference.result.shape, dtypes.name_of(arguments["x"].dtype))

    def _copy_state(self) -> tuple[dict[str, Any], Computation]:
        """Return arguments with running statistics of their own, and the computation that resets and compares them."""
        initial = {n: a for n, a in self._arguments.items() if n.startswith("running_")}
        values = {**self._arguments, **{name: array.copy() for name, array in initial.items()}}

        def reset() -> None:
            for name, array in initial.items():
                values[name][...] = array

        def sample(out: Any, double: Callable[[Any], Any]) -> list[Any]:
            trained = initial if self._flags else ()
            return [double(out), *(self._computation.lab.as_double(values[name]) for name in trained)]

        return values, dataclasses.replace(self._computation, reset=reset, sample=sample)

    def factories(self, max_autotune: bool) -> Factories:
        by_torch = (EAGER, COMPILED, AUTOTUNED) if max_autotune else (EAGER, COMPILED)
        return {
            BOUND: self.bound,
            OURS: self._fused,
            UNFUSED: functools.partial(self._unfused, self._head.__wrapped__),
            PLAIN: functools.partial(self._unfused, plain(self._head, self._computation.lab.cupy)),
            **{rival: functools.partial(self._torch, rival) for rival in by_torch},
        }

    def bound(self) -> Rival:
        values, computation = self._copy_state()
        x = values.pop("x")
        return computation.by_ours(self._head.bind(**values, **self._flags), x)

    def _fused(self) -> Rival:
        values, computation = self._copy_state()
        return computation.by_ours(self._head, *values.values(), *self._flags.values())

    def _unfused(self, function: Callable[..., Any]) -> Rival:
        values, computation = self._copy_state()
        return computation.by(functools.partial(function, **values, **self._flags))

    def _torch(self, rival: str) -> Rival:
        values, computation = self._copy_state()
        x, torch = values.pop("x"), computation.lab.need_torch()
        return computation.by_torch(rival, torch.head(self._name, values, bool(self._flags)), x)


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


def _tail_factories(
    lab: Lab, y: Any, given: Mapping[str, Any], tails: Mapping[str, Callable[..., Any]], reduction: str
) -> Factories:
    """Return the rivals of a whole tail on `y`: cupyfuse's `tails`, and PyTorch's head without its product.

    `reduction` names the head: "logsumexp" or "softmax".
    """
    doubles = {name: lab.as_double(array) for name, array in given.items()}
    head = cupyfuse.heads.find(reduction)
    expected = oracle.evaluate_tail(head, lab.as_double(y) + doubles["bias"], doubles, xp=lab.cupy).result
    computation = Computation(lab, [expected], expected.shape, dtypes.name_of(y.dtype))

    def by_torch(rival: str) -> Rival:
        return computation.by_torch(rival, lab.need_torch().head(head.__wrapped__.__name__, given), y)

    ours = {name: functools.partial(computation.by_ours, function, y) for name, function in tails.items()}
    return {**ours, EAGER: functools.partial(by_torch, EAGER), COMPILED: functools.partial(by_torch, COMPILED)}


def _reduction_factories(lab: Lab, y: Any, reduction: str) -> Factories:
    """Return the libraries' own kernels of the tail's reduction alone."""
    function = getattr(lab.special, reduction)
    expected = function(lab.as_double(y), axis=1)
    computation = Computation(lab, [expected], expected.shape, dtypes.name_of(y.dtype))
    return {
        f"torch.{reduction} alone": lambda: computation.by_torch(EAGER, getattr(lab.need_torch(), reduction), y),
        f"cupyx {reduction} alone": lambda: computation.by(functools.partial(function, y, axis=1)),
    }


def _fold_normalisation(lab: Lab, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute, in float64, the one factor and shift of each column that bias, BatchNorm and scale amount to."""
    doubles = {name: lab.as_double(array) for name, array in given.items()}
    factor = doubles["scale"] * doubles["gamma"] / (doubles["running_var"] + EPSILON) ** 0.5
    shift = (doubles["bias"] - doubles["running_mean"]) * factor + doubles["beta"] * doubles["scale"]
    return {"factor": factor, "shift": shift}


def _tails(lab: Lab, arguments: Mapping[str, Any], dtype: str, budget: float) -> Iterator[Case]:
    """Run both tails on the product of the heads' arguments."""
    x, weight = arguments["x"], arguments["weight"]
    y = (x @ weight.T).astype(x.dtype, copy=False)
    given = {n: arguments[n] for n in ("bias", "running_mean", "running_var", "gamma", "beta", "scale")}
    folded = {n: a.astype(y.dtype) for n, a in _fold_normalisation(lab, given).items()}
    bias = {"bias": given["bias"]}
    of_logsumexp = {OURS: tail_logsumexp.bind(**bias)}
    of_softmax = {OURS: tail_softmax.bind(**given), f"{OURS}, as within the head": tail_of_product.bind(**folded)}
    for name, reduction, values, tails, bytes_moved in (
        ("bias, logsumexp, LeakyReLU x 2, GELU x 2", "logsumexp", bias, of_logsumexp, y.nbytes),
        ("BatchNorm (inference), scale, softmax", "softmax", given, of_softmax, 2 * y.nbytes),
    ):
        lab.release()
        case = Case("After the GEMM", name, (int(y.shape[0]), int(y.shape[1])), dtype, int(bytes_moved))
        factories = {
            **_tail_factories(lab, y, values, tails, reduction),
            **_reduction_factories(lab, y, reduction),
            "device copy": functools.partial(device_copy, lab, y, bytes_moved),
        }
        yield run(lab, case, factories, TAIL_FIGURES, budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the heads, then what follows their GEMM alone."""
    inputs = cupyfuse.heads.example_inputs("head_softmax", *options.shape, options.dtype, options.seed)
    arguments = {name: lab.cupy.asarray(value) for name, value in inputs.items()}
    product = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
    for name, head, training in CASES:
        lab.release()
        case = Case("The heads", name, options.shape, options.dtype)
        factories = Head(lab, head, training, arguments, product).factories(options.max_autotune)
        yield run(lab, case, factories, FIGURES, options.budget)
        del factories
    del product
    yield from _tails(lab, arguments, options.dtype, options.budget)


def report_lines(report: Report) -> list[str]:
    return [*explain(TAIL_FIGURES, _HOW), *case_tables(report, EAGER, ["gpu_back_to_back"])]
