"""The heads: a GEMM and the row operations after it, from `x` to the result; then the row operations alone."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupyfuse.heads
from cupyfuse.heads import oracle
from cupyfuse.heads.oracle import EPSILON, MOMENTUM, SLOPE

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.api.fuse import Fused
from cupyfuse.settings import PRECISIONS

from .lab import AUTOTUNED, BOUND, COMPILED, EAGER, FUSED, Lab, Rival, run
from .options import DTYPES, shape
from .report import Case

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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=shape, default=SHAPE, metavar="BxKxN", help="1024x8192x8192")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="of float32 matrix products, torch's too"
    )
    parser.add_argument("--max-autotune", action="store_true", help="torch.compile in this mode too (takes minutes)")


class Plain:
    """The heads in the operations of an array library and its `special`, one launch or more each."""

    def __init__(self, xp: Any, special: Any):
        self._xp, self._special = xp, special

    def head_logsumexp(self, x: Any, weight: Any, bias: Any) -> Any:
        s = self._special.logsumexp(x @ weight.T + bias, axis=1, keepdims=True)
        for _ in range(2):
            s = self._xp.where(s > 0, s, s * SLOPE)
        for _ in range(2):
            s = s * (0.5 * (1.0 + self._special.erf(s * 0.5**0.5)))
        return s

    def head_sum(self, x: Any, weight: Any, bias: Any) -> Any:
        s = (x @ weight.T + bias).sum(axis=1, keepdims=True)
        s = s.max(axis=1, keepdims=True).mean(axis=1, keepdims=True)
        for _ in range(2):
            s = self._special.logsumexp(s, axis=1, keepdims=True)
        return s

    def head_softmax(
        self, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, gamma: Any, beta: Any, scale: Any,
        training: bool = False,
    ) -> Any:  # fmt: skip
        y = x @ weight.T + bias
        mean, var = running_mean, running_var
        if training:
            mean, var = y.mean(axis=0), y.var(axis=0)
            unbiased = var * (y.shape[0] / (y.shape[0] - 1))
            running_mean[...] = (1.0 - MOMENTUM) * running_mean + MOMENTUM * mean
            running_var[...] = (1.0 - MOMENTUM) * running_var + MOMENTUM * unbiased
        z = (y - mean) / self._xp.sqrt(var + EPSILON) * gamma + beta
        return self._special.softmax(scale * z, axis=1)


class Head:
    """One head on one set of arguments, and how each rival runs it; `product` is ``x @ weight.T`` in float64."""

    def __init__(self, lab: Lab, head: Fused, training: bool, arguments: Mapping[str, Any], product: Any):
        self._lab, self._head, self._name = lab, head, head.__wrapped__.__name__
        self._arguments = {name: arguments[name] for name in cupyfuse.heads.input_shapes(head)}
        self._flags: dict[str, Any] = {"training": True} if training else {}
        x, weight = self._arguments["x"], self._arguments["weight"]
        self._shape = (x.shape[0], weight.shape[0] if head is cupyfuse.heads.head_softmax else 1)
        self._dtype = dtypes.name_of(x.dtype)
        self._size = self._shape[0] * self._shape[1] * x.dtype.itemsize
        doubles = {n: lab.as_double(a) for n, a in self._arguments.items() if n not in ("x", "weight")}
        reference = oracle.evaluate_tail(head, product + doubles["bias"], doubles, training, lab.cupy)
        self._expected = [reference.result, *reference.statistics.values()]

    def _copy_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arguments with running statistics of their own, and how to reset and compare them."""
        initial = {n: a for n, a in self._arguments.items() if n.startswith("running_")}
        values = {**self._arguments, **{name: array.copy() for name, array in initial.items()}}

        def reset() -> None:
            for name, array in initial.items():
                values[name][...] = array

        def sample(out: Any, double: Callable[[Any], Any]) -> list[Any]:
            trained = initial if self._flags else ()
            return [double(out), *(self._lab.as_double(values[name]) for name in trained)]

        return values, {"reset": reset, "sample": sample}

    def factories(self, max_autotune: bool) -> dict[str, Callable[[], Rival]]:
        modes = {EAGER: None, COMPILED: "default", **({AUTOTUNED: "max-autotune"} if max_autotune else {})}
        return {
            BOUND: self.bound,
            FUSED: self._fused,
            UNFUSED: functools.partial(self._returning, self._head.__wrapped__),
            PLAIN: functools.partial(self._returning, getattr(Plain(self._lab.cupy, self._lab.special), self._name)),
            **{name: functools.partial(self._torch, mode) for name, mode in modes.items()},
        }

    def bound(self) -> Rival:
        values, state = self._copy_state()
        x = values.pop("x")
        function = self._head.bind(**values, **self._flags)
        return self._lab.fused_rival(function, (x,), self._expected, self._shape, self._dtype, **state)

    def _fused(self) -> Rival:
        values, state = self._copy_state()
        arguments = (*values.values(), *self._flags.values())
        return self._lab.fused_rival(self._head, arguments, self._expected, self._shape, self._dtype, **state)

    def _returning(self, function: Callable[..., Any]) -> Rival:
        values, state = self._copy_state()
        call = functools.partial(function, *values.values(), *self._flags.values())
        return self._lab.rival(call, self._expected, self._size, **state)

    def _torch(self, mode: str | None) -> Rival:
        torch = self._lab.need_torch(compiling=mode is not None)
        values, state = self._copy_state()
        x = torch.as_tensor(values.pop("x"))
        module = torch.head(self._name, values, bool(self._flags))
        call = functools.partial(torch.compile_static(module, mode) if mode else module, x)
        return self._lab.rival(call, self._expected, self._size, torch=torch, **state)


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
    lab: Lab, y: Any, given: Mapping[str, Any], tails: Mapping[str, Callable[..., Any]], kind: str, moved: int
) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of a tail on `y`: cupyfuse's `tails` of `y` alone, and the `kind` of reduction alone."""
    wide = lab.as_double(y)
    doubles = {name: lab.as_double(array) for name, array in given.items()}
    head = cupyfuse.heads.find(kind)
    whole = [oracle.evaluate_tail(head, wide + doubles["bias"], doubles, xp=lab.cupy).result]
    alone = [getattr(lab.special, kind)(wide, axis=1)]
    shape = whole[0].shape

    def fused(function: Callable[..., Any]) -> Rival:
        def capture() -> Any:
            out = lab.allocate_poisoned(shape, y.dtype)
            return lab.device.capture(functools.partial(function, y, out=out))

        return lab.fused_rival(function, (y,), whole, shape, dtypes.name_of(y.dtype), capture=capture)

    def torch(of_tail: bool, compiling: bool = False) -> Rival:
        rivals = lab.need_torch(compiling)
        function = getattr(rivals, f"tail_{kind}" if of_tail else kind)
        tensors = [rivals.as_tensor(array) for array in (y, *(given.values() if of_tail else ()))]
        call = functools.partial(rivals.compile_static(function) if compiling else function, *tensors)
        expected = whole if of_tail else alone
        capture = functools.partial(rivals.capture, call)
        return lab.rival(call, expected, 4 * expected[0].size, torch=rivals, capture=capture)

    def cupyx() -> Rival:
        call = functools.partial(getattr(lab.special, kind), y, axis=1)
        return lab.rival(call, alone, 4 * alone[0].size, capture=functools.partial(lab.device.capture, call))

    return {
        **{name: functools.partial(fused, function) for name, function in tails.items()},
        EAGER: functools.partial(torch, True),
        COMPILED: functools.partial(torch, True, compiling=True),
        f"torch.{kind} alone": functools.partial(torch, False),
        f"cupyx {kind} alone": cupyx,
        "device copy": lambda: lab.device_copy(y, moved),
    }


def _tails(lab: Lab, arguments: Mapping[str, Any], dtype: str, budget: float) -> Iterator[Case]:
    """Run both tails on the product of the heads' arguments."""
    x, weight = arguments["x"], arguments["weight"]
    y = (x @ weight.T).astype(x.dtype, copy=False)
    given = {n: arguments[n] for n in ("bias", "running_mean", "running_var", "gamma", "beta", "scale")}
    wide = {name: lab.as_double(array) for name, array in given.items()}
    factor = wide["scale"] * wide["gamma"] / (wide["running_var"] + EPSILON) ** 0.5
    shift = (wide["bias"] - wide["running_mean"]) * factor + wide["beta"] * wide["scale"]
    folded = {"factor": factor.astype(y.dtype), "shift": shift.astype(y.dtype)}
    bias = {"bias": given["bias"]}
    of_logsumexp = {FUSED: tail_logsumexp.bind(**bias)}
    of_softmax = {FUSED: tail_softmax.bind(**given), f"{FUSED}, as within the head": tail_of_product.bind(**folded)}
    for name, kind, values, tails, moved in (
        ("bias, logsumexp, LeakyReLU x 2, GELU x 2", "logsumexp", bias, of_logsumexp, y.nbytes),
        ("BatchNorm (inference), scale, softmax", "softmax", given, of_softmax, 2 * y.nbytes),
    ):
        lab.release()
        case = Case("After the GEMM", name, (int(y.shape[0]), int(y.shape[1])), dtype, int(moved))
        yield run(lab, case, _tail_factories(lab, y, values, tails, kind, moved), TAIL_FIGURES, budget)


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
