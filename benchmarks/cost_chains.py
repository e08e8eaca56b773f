"""The chains on which the cost model is held beside measurements. Imported only where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cupyfuse.torch.chains.chain import Call, Chain, Meta
from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.symbols import Ref

NORMALIZED = 1e-5  # epsilon
Built = tuple[Chain, list[Meta]]


class Builder:
    """A chain in the making: inputs, then operations on them.

    Parameters
    ----------
    dtype : str
        Of all inputs.
    """

    def __init__(self, dtype: str):
        self._dtype = dtype
        self._names: list[str] = []
        self._metas: list[Meta] = []
        self._fixed: set[int] = set()
        self._steps: list[tuple[str, tuple[Any, ...], int]] = []

    def input(self, *shape: int) -> Ref:
        self._names.append(f"x{len(self._names)}")
        self._metas.append((shape, self._dtype))
        return Ref(len(self._names) - 1)

    def weight(self, *shape: int) -> Ref:
        found = self.input(*shape)
        self._fixed.add(found.number)
        return found

    def __call__(self, rule: str, *arguments: Any, **named: Any) -> Ref:
        """An operation by the name of its rule; all inputs have to be there before the first one."""
        bound = RULES[rule].signature.bind(*arguments, **named)
        bound.apply_defaults()
        self._steps.append((rule, bound.args, len(self._names) + len(self._steps)))
        return Ref(self._steps[-1][2])

    def chain(self, *outputs: Ref) -> Built:
        calls = []
        for rule, arguments, number in self._steps:
            others = (-1,) * len(RULES[rule].updates)
            calls.append(Call(rule, arguments, (number, *others)))
        numbers = tuple(o.number for o in outputs)
        return Chain(tuple(self._names), tuple(calls), numbers, (), frozenset(self._fixed)), self._metas


Shape = tuple[int, ...]


def linear(dtype: str, shape: Shape, then: Callable[[Builder, Ref], Ref] = lambda b, y: y, bias: bool = True) -> Built:
    m, k, n = shape
    b = Builder(dtype)
    operands = [b.input(m, k), b.weight(n, k), *([b.weight(n)] if bias else [])]
    return b.chain(then(b, b("linear", *operands)))


def _logsumexp_tail(b: Builder, y: Ref) -> Ref:
    s = b("logsumexp", y, (1,), True)
    s = b("leaky_relu", b("leaky_relu", s, 0.01), 0.01)
    return b("gelu", b("gelu", s))


def _sum_tail(b: Builder, y: Ref) -> Ref:
    s = b("mean", b("max_dim", b("sum", y, 1, True), 1, True), 1, True)
    return b("logsumexp", b("logsumexp", s, (1,), True), (1,), True)


def head_logsumexp(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, _logsumexp_tail)


def head_sum(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, _sum_tail)


def head_softmax(dtype: str, shape: Shape) -> Built:
    m, k, n = shape
    b = Builder(dtype)
    x, w, bias = b.input(m, k), b.weight(n, k), b.weight(n)
    mean, variance, gamma, beta, scale = (b.weight(n) for _ in range(5))
    y = b("batch_norm", b("linear", x, w, bias), mean, variance, gamma, beta)
    return b.chain(b("softmax", b("mul", scale, y), 1))


def linear_gelu(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, lambda b, y: b("gelu", y))


def linear_relu(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, lambda b, y: b("div", b("relu", y), 2.0))


def linear_softmax(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, lambda b, y: b("softmax", y, 1))


def vocabulary(dtype: str, shape: Shape) -> Built:
    return linear(dtype, shape, lambda b, y: b("log_softmax", y, 1), bias=False)


def mlp(dtype: str, shape: Shape) -> Built:
    """LayerNorm, Linear, GELU, Linear, and what came in added."""
    m, k, n = shape
    b = Builder(dtype)
    x, gamma, beta = b.input(m, k), b.weight(k), b.weight(k)
    up, up_bias, down, down_bias = b.weight(n, k), b.weight(n), b.weight(k, n), b.weight(k)
    y = b("gelu", b("linear", b("layer_norm", x, (k,), gamma, beta, NORMALIZED), up, up_bias))
    return b.chain(b("add", x, b("linear", y, down, down_bias)))


def swiglu(dtype: str, shape: Shape) -> Built:
    m, k, n = shape
    b = Builder(dtype)
    x, gate, up = b.input(m, k), b.weight(n, k), b.weight(n, k)
    return b.chain(b("mul", b("silu", b("linear", x, gate)), b("linear", x, up)))


def softmax(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    return b.chain(b("softmax", b.input(*shape), 1))


def scaled_softmax(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    return b.chain(b("softmax", b("mul", b.input(*shape), 2.0), 1))


def logsumexp(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    return b.chain(b("logsumexp", b.input(*shape), (1,), True))


def add_layer_norm(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    x, y, gamma, beta = b.input(*shape), b.input(*shape), b.weight(shape[1]), b.weight(shape[1])
    return b.chain(b("layer_norm", b("add", x, y), (shape[1],), gamma, beta, NORMALIZED))


def add_rms_norm(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    x, y, gamma = b.input(*shape), b.input(*shape), b.weight(shape[1])
    total = b("add", x, y)
    return b.chain(total, b("rms_norm", total, (shape[1],), gamma, NORMALIZED))


def bias_gelu(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    x, bias = b.input(*shape), b.weight(shape[1])
    return b.chain(b("gelu", b("add", x, bias)))


def pointwise(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    x, y = b.input(*shape), b.input(*shape)
    return b.chain(b("mul", b("tanh", b("add", b("mul", x, y), 1.0)), x))


def column_means(dtype: str, shape: Shape) -> Built:
    b = Builder(dtype)
    return b.chain(b("mean", b("square", b.input(*shape)), 0))


F32, BF16 = ("float32",), ("bfloat16",)
BOTH = F32 + BF16
# Chain, dtypes, shapes: rows, depth and columns of products, rows and columns of other chains. In the order in which
# they are measured: what decides most comes first.
PLAN: tuple[tuple[Callable[[str, Shape], Built], tuple[str, ...], tuple[Shape, ...]], ...] = (
    (linear_gelu, BOTH, ((4096, 768, 3072), (256, 512, 512), (64, 2048, 2048))),
    (linear, BOTH, ((4096, 768, 768), (256, 512, 512))),
    (mlp, BOTH, ((4096, 768, 3072), (128, 512, 2048))),
    (add_layer_norm, BOTH, ((4096, 768), (128, 512), (32768, 2048))),
    (scaled_softmax, BOTH, ((64, 256), (4096, 1024), (1024, 8192))),
    (head_sum, BOTH, ((1024, 8192, 8192), (128, 512, 512))),
    (head_logsumexp, BOTH, ((1024, 8192, 8192), (128, 1024, 1024))),
    (head_softmax, BOTH, ((1024, 8192, 8192),)),
    (bias_gelu, BOTH, ((4096, 3072), (128, 512))),
    (swiglu, BOTH, ((2048, 2048, 5632),)),
    (add_rms_norm, BOTH, ((2048, 2048),)),
    (pointwise, BOTH, ((64, 256), (8192, 8192))),
    (logsumexp, BOTH, ((128, 512), (4096, 32000))),
    (softmax, BOTH, ((64, 256), (8192, 8192), (1024, 65536))),
    (linear_softmax, BOTH, ((512, 1024, 1000),)),
    (linear_relu, BOTH, ((1024, 8192, 8192),)),
    (vocabulary, BOTH, ((1024, 2048, 32000),)),
    (column_means, BOTH, ((16384, 1024),)),
    (linear, F32, ((32, 4096, 4096), (2048, 8192, 8192))),
)
SMALL = (
    (linear_gelu, BF16, ((4, 16, 8),)),
    (head_sum, F32, ((4, 16, 8),)),
    (scaled_softmax, F32, ((4, 16),)),
)


@dataclass(frozen=True)
class Question:
    """A chain for inputs of one shape and dtype."""

    name: str
    dtype: str
    shape: Shape
    chain: Chain
    metas: tuple[Meta, ...]


def questions(plan: Any = PLAN) -> Iterator[Question]:
    for build, kinds, shapes in plan:
        for shape in shapes:
            for dtype in kinds:
                chain, metas = build(dtype, shape)
                yield Question(build.__name__, dtype, shape, chain, tuple(metas))


def as_written(chain: Chain) -> Callable[..., list[Any]]:
    """The chain as a function of its inputs, one line of PyTorch an operation, as a module would have it."""
    scope: dict[str, Any] = {}
    lines = []

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            return f"v{value.number}"
        return "(" + "".join(text(v) + ", " for v in value) + ")" if isinstance(value, tuple) else repr(value)

    for k, call in enumerate(chain.calls):
        scope[f"f{k}"] = RULES[call.rule].eager
        targets = [f"v{n}" if n >= 0 else "_" for n in call.results]
        lines.append(f"{', '.join(targets)} = f{k}({', '.join(map(text, call.arguments))})")
    lines.append(f"return [{', '.join(f'v{n}' for n in chain.outputs)}]")
    body = "\n    ".join(lines)
    exec(f"def forward({', '.join(f'v{k}' for k in range(len(chain.names)))}):\n    {body}\n", scope)
    forward: Callable[..., list[Any]] = scope["forward"]
    return forward
