"""After the GEMM: the row operations of the heads alone, from `y` (B, N) to the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cupyfuse as cf
from cupyfuse import dtypes

from .cases import Lab, Rival, run
from .device import Call
from .plain import EPSILON
from .report import Case

FIGURES = ("gpu_evicted", "gpu_back_to_back", "gpu_graph", "host")
STATISTICS = ("bias", "running_mean", "running_var", "gamma", "beta", "scale")


@cf.fuse
def tail_logsumexp(y: Any, bias: Any) -> Any:
    """Bias, logsumexp, LeakyReLU twice, GELU twice; from (B, N) to (B, 1)."""
    s = cf.logsumexp(y + bias, axis=1, keepdims=True)
    return cf.gelu(cf.gelu(cf.leaky_relu(cf.leaky_relu(s))))


@cf.fuse
def tail_softmax(y: Any, bias: Any, running_mean: Any, running_var: Any, gamma: Any, beta: Any, scale: Any) -> Any:
    """Bias, BatchNorm with running statistics, a scale, softmax; bound, one multiply-add a column and softmax."""
    return cf.softmax(scale * cf.batch_norm(y + bias, running_mean, running_var, gamma, beta), axis=1)


@cf.fuse
def tail_of_product(y: Any, factor: Any, shift: Any) -> Any:
    """What head_softmax runs after its matrix product: there, every step before the softmax folds into two columns."""
    return cf.softmax(y * factor + shift, axis=1)


def fused(lab: Lab, function: Callable[..., Any], y: Any, columns: int, expected: Sequence[Any]) -> Rival:
    """A cupyfuse function of `y` alone; its graph is captured with the result going to one array."""
    out = ((y.shape[0], columns), dtypes.name_of(y.dtype))

    def capture() -> Call:
        target = lab.poisoned(out[0], y.dtype)
        return lab.device.capture(functools.partial(function, y, out=target))

    return Rival(functools.partial(function, y), lab.fused_attempts(function, (y,), out), expected, capture)


def cupyx(lab: Lab, call: Call, expected: Sequence[Any]) -> Rival:
    """A function of CuPy's."""

    def attempt() -> list[Any]:
        lab.poison_pool(4 * expected[0].size)
        return [lab.as_double(call())]

    return Rival(call, [attempt], expected, functools.partial(lab.device.capture, call))


def torch(lab: Lab, build: Callable[[Any], Call], expected: Sequence[Any], compiling: bool = False) -> Rival:
    """A function of PyTorch's; `build` makes the call, given `benchmarks.rivals`."""
    rivals = lab.need_compiler() if compiling else lab.need_torch()
    call = build(rivals)

    def attempt() -> list[Any]:
        rivals.poison(4 * expected[0].size)
        return [rivals.as_double(call(), lab.cupy)]

    return Rival(call, [attempt], expected, functools.partial(rivals.capture, call))


def device_copy(lab: Lab, source: Any, moved: int) -> Rival:
    """A copy that reads half of `moved` bytes and writes as many: what the memory gives at best."""
    size = moved // 2 // source.dtype.itemsize
    flat = source.reshape(-1)[:size]
    target = lab.poisoned(flat.shape, flat.dtype)

    call = functools.partial(lab.device.copy, target, flat)

    def attempt() -> list[Any]:
        call()
        return [lab.as_double(target[-4096:])]

    expected = [lab.as_double(flat[-4096:])]
    return Rival(call, [attempt], expected, functools.partial(lab.device.capture, call))


def logsumexp_factories(lab: Lab, y: Any, arguments: Mapping[str, Any], moved: int) -> dict[str, Callable[[], Rival]]:
    bias = arguments["bias"]
    doubles = lab.as_double(y)
    whole = [lab.plain.logsumexp_tail(doubles, lab.as_double(bias))]
    alone = [lab.special.logsumexp(doubles, axis=1)]

    def eager(rivals: Any) -> Call:
        return functools.partial(rivals.logsumexp_tail, rivals.share(y), rivals.share(bias))

    def compiled(rivals: Any) -> Call:
        return functools.partial(rivals.compiled(rivals.logsumexp_tail), rivals.share(y), rivals.share(bias))

    def single(rivals: Any) -> Call:
        return functools.partial(rivals.logsumexp, rivals.share(y))

    return {
        "cupyfuse": lambda: fused(lab, tail_logsumexp.bind(bias=bias), y, 1, whole),
        "torch eager": lambda: torch(lab, eager, whole),
        "torch.compile": lambda: torch(lab, compiled, whole, compiling=True),
        "torch.logsumexp alone": lambda: torch(lab, single, alone),
        "cupyx logsumexp alone": lambda: cupyx(lab, functools.partial(lab.special.logsumexp, y, axis=1), alone),
        "device copy": lambda: device_copy(lab, y, moved),
    }


def softmax_factories(lab: Lab, y: Any, arguments: Mapping[str, Any], moved: int) -> dict[str, Callable[[], Rival]]:
    given = {name: arguments[name] for name in STATISTICS}
    doubles = lab.as_double(y)
    wide = {name: lab.as_double(a) for name, a in given.items()}
    factor = wide["scale"] * wide["gamma"] / (wide["running_var"] + EPSILON) ** 0.5
    shift = (wide["bias"] - wide["running_mean"]) * factor + wide["beta"] * wide["scale"]
    folded = {"factor": factor.astype(y.dtype), "shift": shift.astype(y.dtype)}
    whole = [lab.plain.softmax_tail(doubles, **{name: lab.as_double(a) for name, a in given.items()})]
    alone = [lab.special.softmax(doubles, axis=1)]

    def eager(rivals: Any) -> Call:
        return functools.partial(rivals.BiasedSoftmaxTail(*given.values()), rivals.share(y))

    def compiled(rivals: Any) -> Call:
        return functools.partial(rivals.compiled(rivals.BiasedSoftmaxTail(*given.values())), rivals.share(y))

    def single(rivals: Any) -> Call:
        return functools.partial(rivals.softmax, rivals.share(y))

    return {
        "cupyfuse": lambda: fused(lab, tail_softmax.bind(**given), y, y.shape[1], whole),
        "cupyfuse, as within the head": lambda: fused(lab, tail_of_product.bind(**folded), y, y.shape[1], whole),
        "torch eager": lambda: torch(lab, eager, whole),
        "torch.compile": lambda: torch(lab, compiled, whole, compiling=True),
        "torch.softmax alone": lambda: torch(lab, single, alone),
        "cupyx softmax alone": lambda: cupyx(lab, functools.partial(lab.special.softmax, y, axis=1), alone),
        "device copy": lambda: device_copy(lab, y, moved),
    }


def cases(lab: Lab, arguments: Mapping[str, Any], dtype: str, budget: float) -> Iterator[Case]:
    """Run both tails on the product of the heads' arguments."""
    x, weight = arguments["x"], arguments["weight"]
    y = (x @ weight.T).astype(x.dtype, copy=False)
    group, shape = "After the GEMM", (int(y.shape[0]), int(y.shape[1]))
    for name, moved, makers in (
        ("bias, logsumexp, LeakyReLU x 2, GELU x 2", y.nbytes, logsumexp_factories),
        ("BatchNorm (inference), scale, softmax", 2 * y.nbytes, softmax_factories),
    ):
        lab.release()
        case = Case(group, name, shape, dtype, int(moved))
        yield run(lab, case, makers(lab, y, arguments, moved), FIGURES, budget)
