"""The chains on which the cost model is compared with measurements. Imported only where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cupyfuse.torch.chains.chain import Call, Chain, Meta
from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.symbols import Ref

EPSILON = 1e-5  # of normalisations
Shape = tuple[int, ...]
Built = tuple[Chain, list[Meta]]


class Builder:
    """A chain in the making: its methods are operations, by the names of their rules."""

    def __init__(self, inputs: int, lengths: dict[str, int]):
        self._inputs, self.lengths = inputs, lengths
        self.calls: list[Call] = []

    def __getattr__(self, rule: str) -> Callable[..., Ref]:
        def call(*arguments: Any, **named: Any) -> Ref:
            bound = RULES[rule].signature.bind(*arguments, **named)
            bound.apply_defaults()
            result = Ref(self._inputs + len(self.calls))
            self.calls.append(Call(rule, bound.args, (result.number, *(-1,) * len(RULES[rule].updates))))
            return result

        return call


@dataclass(frozen=True)
class Recipe:
    """A chain for any shape: called with a dtype and a shape, it returns the chain and its inputs' metas."""

    name: str
    inputs: str  # shapes in letters, of (m, k, n) for chains with products, of (m, n) for others; stars mark weights
    body: Callable[..., Ref | tuple[Ref, ...]]  # builds the results from a `Builder` and the inputs

    def __call__(self, dtype: str, shape: Shape) -> Built:
        lengths = dict(zip("mkn" if len(shape) == 3 else "mn", shape, strict=True))
        inputs = self.inputs.split()
        metas: list[Meta] = [(tuple(lengths[letter] for letter in each.lstrip("*")), dtype) for each in inputs]
        builder = Builder(len(inputs), lengths)
        results = self.body(builder, *map(Ref, range(len(inputs))))
        outputs = tuple(ref.number for ref in (results if isinstance(results, tuple) else (results,)))
        fixed = frozenset(k for k, each in enumerate(inputs) if each.startswith("*"))
        names = tuple(f"x{k}" for k in range(len(inputs)))
        return Chain(names, tuple(builder.calls), outputs, (), fixed), metas


def _head_softmax(b: Any, x: Ref, w: Ref, bias: Ref, mean: Ref, var: Ref, gamma: Ref, beta: Ref, scale: Ref) -> Ref:
    return b.softmax(b.mul(scale, b.batch_norm(b.linear(x, w, bias), mean, var, gamma, beta)), 1)


def _head_logsumexp(b: Any, x: Ref, w: Ref, bias: Ref) -> Ref:
    s = b.logsumexp(b.linear(x, w, bias), (1,), True)
    return b.gelu(b.gelu(b.leaky_relu(b.leaky_relu(s, 0.01), 0.01)))


def _head_sum(b: Any, x: Ref, w: Ref, bias: Ref) -> Ref:
    s = b.mean(b.max_dim(b.sum(b.linear(x, w, bias), 1, True), 1, True), 1, True)
    return b.logsumexp(b.logsumexp(s, (1,), True), (1,), True)


def _mlp(b: Any, x: Ref, gamma: Ref, beta: Ref, up: Ref, up_bias: Ref, down: Ref, down_bias: Ref) -> Ref:
    """LayerNorm, Linear, GELU, Linear, and what came in added."""
    y = b.layer_norm(x, (b.lengths["k"],), gamma, beta, EPSILON)
    return b.add(x, b.linear(b.gelu(b.linear(y, up, up_bias)), down, down_bias))


def _block(b: Any, x: Ref, y: Ref, gamma: Ref, beta: Ref, up: Ref, up_bias: Ref, down: Ref, down_bias: Ref) -> Ref:
    """A block of BERT behind its attention: what comes in added, LayerNorm, Linear, GELU, Linear, the same again."""
    first = b.layer_norm(b.add(x, y), (b.lengths["k"],), gamma, beta, EPSILON)
    second = b.add(b.linear(b.gelu(b.linear(first, up, up_bias)), down, down_bias), first)
    return b.layer_norm(second, (b.lengths["k"],), gamma, beta, EPSILON)


def _add_rms_norm(b: Any, x: Ref, y: Ref, gamma: Ref) -> tuple[Ref, Ref]:
    total = b.add(x, y)
    return total, b.rms_norm(total, (b.lengths["n"],), gamma, EPSILON)


def _add_layer_norm(b: Any, x: Ref, y: Ref, gamma: Ref, beta: Ref) -> Ref:
    return b.layer_norm(b.add(x, y), (b.lengths["n"],), gamma, beta, EPSILON)


LINEAR = "mk *nk *n"
head_logsumexp = Recipe("head_logsumexp", LINEAR, _head_logsumexp)
head_sum = Recipe("head_sum", LINEAR, _head_sum)
head_softmax = Recipe("head_softmax", f"{LINEAR} *n *n *n *n *n", _head_softmax)
linear = Recipe("linear", LINEAR, lambda b, *inputs: b.linear(*inputs))
linear_gelu = Recipe("linear_gelu", LINEAR, lambda b, *inputs: b.gelu(b.linear(*inputs)))
linear_relu = Recipe("linear_relu", LINEAR, lambda b, *inputs: b.div(b.relu(b.linear(*inputs)), 2.0))
linear_softmax = Recipe("linear_softmax", LINEAR, lambda b, *inputs: b.softmax(b.linear(*inputs), 1))
vocabulary = Recipe("vocabulary", "mk *nk", lambda b, *inputs: b.log_softmax(b.linear(*inputs), 1))
mlp = Recipe("mlp", "mk *k *k *nk *n *kn *k", _mlp)
block = Recipe("block", "mk mk *k *k *nk *n *kn *k", _block)
swiglu = Recipe("swiglu", "mk *nk *nk", lambda b, x, gate, up: b.mul(b.silu(b.linear(x, gate)), b.linear(x, up)))
softmax = Recipe("softmax", "mn", lambda b, x: b.softmax(x, 1))
scaled_softmax = Recipe("scaled_softmax", "mn", lambda b, x: b.softmax(b.mul(x, 2.0), 1))
logsumexp = Recipe("logsumexp", "mn", lambda b, x: b.logsumexp(x, (1,), True))
add_layer_norm = Recipe("add_layer_norm", "mn mn *n *n", _add_layer_norm)
add_rms_norm = Recipe("add_rms_norm", "mn mn *n", _add_rms_norm)
bias_gelu = Recipe("bias_gelu", "mn *n", lambda b, x, bias: b.gelu(b.add(x, bias)))
pointwise = Recipe("pointwise", "mn mn", lambda b, x, y: b.mul(b.tanh(b.add(b.mul(x, y), 1.0)), x))
column_means = Recipe("column_means", "mn", lambda b, x: b.mean(b.square(x), 0))

F32, BF16 = ("float32",), ("bfloat16",)
BOTH = F32 + BF16
# Chain, dtypes, shapes: rows, depth and columns of products, rows and columns of other chains. In the order in which
# they are measured: what decides most comes first.
PLAN: tuple[tuple[Recipe, tuple[str, ...], tuple[Shape, ...]], ...] = (
    (linear_gelu, BOTH, ((4096, 768, 3072), (256, 512, 512), (64, 2048, 2048))),
    (linear, BOTH, ((4096, 768, 768), (256, 512, 512))),
    (mlp, BOTH, ((4096, 768, 3072), (128, 512, 2048))),
    (mlp, BF16, ((16384, 1024, 4096),)),
    (block, BF16, ((4096, 768, 3072), (16384, 768, 3072))),
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


@dataclass(frozen=True)
class SizedChain:
    """A chain for inputs of one shape and dtype; `shape` is (M, K, N) for products, else (M, N)."""

    name: str
    dtype: str
    shape: Shape
    chain: Chain
    metas: tuple[Meta, ...]


def sized_chains() -> Iterator[SizedChain]:
    """Yield the chains of `PLAN` in its order."""
    for recipe, dtypes, shapes in PLAN:
        for shape in shapes:
            for dtype in dtypes:
                chain, metas = recipe(dtype, shape)
                yield SizedChain(recipe.name, dtype, shape, chain, tuple(metas))


def as_written(chain: Chain) -> Callable[..., list[Any]]:
    """Return the chain as a function of its inputs, one line of PyTorch an operation, as a module would have it."""
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
