"""Parts of rows and rows side by side: slices, `chunk`, `split`, `narrow`, `glu` and `cat` along the last dimension."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_support import Code

import cupyfuse.torch as ct
from cupyfuse.settings import Settings
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.chains.tensors import without_memory
from cupyfuse.torch.cost import decision
from cupyfuse.torch.cost.estimate import estimate
from cupyfuse.torch.graphs.partition import Verdict
from cupyfuse.torch.rules.symbols import Ref

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Tensors = list[torch.Tensor]


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embeddings, as transformers computes them."""
    return x * cos + rotate_half(x) * sin


def partly_rotary(x: Any, cos: Any, sin: Any) -> Any:
    """Those of a part of each head."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((rotary(turned, cos, sin), rest), dim=-1)


def gated(x: Any) -> Any:
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def interleaved_sum(x: Any) -> Any:
    first, second, third = x.split([3, 4, x.shape[-1] - 7], dim=-1)
    return torch.cat((third.exp(), first * 2, second.tanh()), dim=-1).softmax(-1)


# Functions with the shapes of their operands, and their launches.
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "rotary": (rotary, [(2, 5, 4, 16), (2, 5, 1, 16), (2, 5, 1, 16)], 1),
    "rotary, of other halves": (rotary, [(2, 5, 4, 10), (2, 5, 4, 10), (2, 5, 4, 10)], 1),
    "rotary, of a part": (partly_rotary, [(6, 24), (6, 16), (6, 16)], 1),
    "gated": (gated, [(6, 32)], 1),
    "gated, of what is computed": (lambda x: gated(x.tanh() * 3), [(6, 32)], 1),
    "glu": (lambda x: F.glu(x * 2), [(2, 3, 10)], 1),
    "three parts": (lambda x: torch.cat([t.exp() * k for k, t in enumerate(x.split(4, 1))], 1), [(5, 12)], 1),
    "an end": (lambda x: (x * 3)[..., -5:].softmax(-1), [(5, 12)], 1),
    "a norm of a part": (lambda x: F.rms_norm(x[..., 2:10], (8,)), [(5, 12)], 1),
    "a vector": (lambda x: torch.cat((x[:3].exp(), x[5:8].tanh() * 2)), [(9,)], 1),
    "dtypes": (lambda x, y: torch.cat((x.exp(), y.double() * 2), -1), [(5, 4), (5, 4)], 1),
    "one column": (lambda x: torch.cat((x[..., :1].exp(), x[..., 1:] * 2), -1), [(5, 4)], 2),
    "all rows, counted": (lambda x: x.exp()[0:4, 1:5] * 2, [(4, 8)], 1),
    "all tokens, counted": (lambda x, y: x.exp() * y.tanh()[:, : x.shape[1]], [(2, 3, 8), (1, 3, 8)], 1),
    "a vector for all rows": (lambda x, y, z: (x * torch.cat((y, z * 2))).softmax(-1), [(5, 12), (7,), (5,)], 3),
    "a part of two, reduced": (lambda x, y: torch.cat((x.exp(), y), -1)[:, 2:7].softmax(-1), [(5, 4), (5, 4)], 2),
    "repeated": (lambda x: torch.cat((x.exp(), x.exp(), x), -1), [(5, 4)], 1),
}


def results_of(module: nn.Module, tensors: Tensors) -> tuple[Any, Tensors]:
    """The result, and the gradients."""
    given = [t.clone().requires_grad_() for t in tensors]
    result = module(*given)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype, device=result.device).view(result.shape))
    return result.detach(), [t.grad for t in given]  # type: ignore[misc]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, device: str) -> None:
    function, shapes, launches = FUNCTIONS[name]
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    fused = ct.fuse(Code(function))
    expected, gradients = results_of(Code(function), tensors)
    found, fused_gradients = results_of(fused, tensors)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fused_gradients, gradients)
    assert found.stride() == expected.stride()
    with torch.no_grad():
        torch.testing.assert_close(fused(*tensors), expected)
    found = re.findall(r"fused: +(\d+) launch", str(fused.explain().details()))
    assert set(map(int, found)) == {launches}  # of the forward pass, with gradients and without


# Random programs ----------------------------------------------------------------------------------------------------

POINTWISE: tuple[Callable[[Any], Any], ...] = (torch.tanh, torch.sigmoid, torch.neg, lambda x: x * 1.5, torch.square)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (torch.add, torch.mul, torch.sub, torch.maximum)
OF_ROWS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.softmax(-1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.sum(-1, keepdim=True),
    lambda x: F.layer_norm(x, x.shape[-1:]),
)


def random_program(generator: Any) -> Callable[..., Any]:
    """A function of (x, y, weight) that cuts rows into parts, computes with them, and puts them side by side."""
    steps = [int(n) for n in torch.randint(0, 10_000, (12,), generator=generator)]

    def program(x: Any, y: Any, weight: Any) -> Any:
        values, results = [x, y], []
        for step in steps:
            kind, step = step % 9, step // 9
            value, other = values[step % len(values)], values[(step // 7) % len(values)]
            width = value.shape[-1]
            if kind < 2:
                value = POINTWISE[step % len(POINTWISE)](value)
            elif kind == 2 and other.shape[-1] in (1, width):
                value = BINARY[step % len(BINARY)](value, other)
            elif kind == 3 and width > 1:
                cut = 1 + step % (width - 1)
                value = value[..., cut:] if step % 2 else value[..., :cut]
            elif kind == 4 and width >= 4:
                values += value.chunk(2 + step % 3, -1) if step % 2 else value.split(1 + step % (width - 1), -1)
                continue
            elif kind in (5, 6):
                value = torch.cat((value, other) if kind == 5 else (other, value, other), -1)
            elif kind == 7:
                value = OF_ROWS[step % len(OF_ROWS)](value)
            elif kind == 8:
                value = F.linear(value, weight[:, :width]) if width <= weight.shape[1] else F.relu(value)
            if value.shape[-1] <= 64:
                values.append(value)
            if step % 5 == 0:
                results.append(value)
        return (*results, values[-1].tanh())

    return program


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(150))
def test_random_programs(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    program = random_program(generator)
    leading = [(3,), (2, 5), (1,), ()][seed % 4]
    tensors = [torch.randn(*leading, 12, generator=generator, dtype=torch.float64) for _ in range(2)]
    tensors.append(torch.randn(6, 16, generator=generator, dtype=torch.float64))
    tensors = [t.to(device) for t in tensors]
    fused = ct.fuse(Code(program))
    with torch.no_grad():
        pairs = list(zip(fused(*tensors), program(*tensors), strict=True))
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
    gradients = []
    for function in (fused, program):
        given = [t.clone().requires_grad_() for t in tensors]
        results = [r for r in function(*given) if r.requires_grad]
        loss = sum(
            (r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype, device=device).view_as(r)).sum() for r in results
        )
        gradients.append(torch.autograd.grad(loss, given, allow_unused=True))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_sums_with_a_bias_are_rounded_once(device: str, training: bool) -> None:
    """A product that the bias cancels is not rounded at its own size, although a part of the sum is read."""
    linear = nn.Linear(32, 64, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        linear.weight.copy_(1 + torch.randn(64, 32) * 0.01)
        linear.bias.fill_(-96.0)
    x = (3 + torch.randn(64, 32) * 0.1).to(device, torch.bfloat16)

    class Gated(nn.Module):
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.linear = linear

        def forward(self, x: Any) -> Any:
            return F.glu(self.linear(x))

    with torch.set_grad_enabled(training):
        found = ct.fuse(Gated(linear))(x).detach().double()
        eager = Gated(linear)(x).detach().double()
        exact = F.glu(F.linear(x.double(), linear.weight.double(), linear.bias.double())).detach()
    assert float((found - exact).norm()) <= 1.1 * float((eager - exact).norm())


def test_views_stay_views() -> None:
    """A part that is returned shares memory with what it is a part of, as in eager."""

    def parts(x: Any) -> Any:
        y = x.exp() * 2
        first, second = y.chunk(2, -1)
        return y, first, second * first

    x = torch.randn(4, 6)
    whole, first, _ = ct.fuse(Code(parts))(x)
    first.zero_()
    assert (whole[:, :3] == 0).all() and (whole[:, 3:] != 0).all()


def test_a_part_that_is_written_to() -> None:
    def written(x: Any) -> Any:
        y = x.exp()
        y[..., :2] = 7.0
        return y[..., :4] * y[..., 4:]

    x = torch.randn(3, 8)
    torch.testing.assert_close(ct.fuse(Code(written))(x), written(x))


def test_second_derivatives() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ct.fuse(Code(lambda x: gated(x * 2))), (x,))


def test_parts_that_others_read_too_are_cut_by_pytorch() -> None:
    """It puts the gradients of all of them together in one copy. Those that nobody else reads are of the chain."""
    for function, inside in (
        (lambda x: (lambda a, b: (a.exp() * 2, b.sort(-1)[0]))(*x.chunk(2, -1)), False),
        (lambda x: (lambda a, b: (a.exp() * 2 + b, x.sort(-1)[0]))(*x.chunk(2, -1)), True),
    ):
        fused, x, given = ct.fuse(Code(function)), torch.randn(4, 6, requires_grad=True), []
        for module in (fused, Code(function)):
            given.append(torch.autograd.grad(sum(r.sum() for r in module(x)), x)[0])
        torch.testing.assert_close(*given)
        (chain,) = fused.explain().fused
        assert ("chunk" in chain.operations) == inside


def test_a_part_of_a_weight_is_a_view() -> None:
    """Products read it where it is; within a chain they would read a copy."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Any) -> Any:
            return F.linear(x, self.weight[:, :6]).softmax(-1)

    module, x = Sliced(), torch.randn(4, 6)
    fused = ct.fuse(module)
    torch.testing.assert_close(fused(x), F.linear(x, module.weight[:, :6]).softmax(-1))
    (chain,) = fused.explain().fused
    assert list(chain.operations) == ["linear", "softmax"]
    assert "Copy" not in str(fused.explain().details())


def test_a_part_that_loses_leaves_what_is_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rotary embeddings of transposed heads, which kernels read as copies: their cosines gain."""

    def judge(chain: Any, inputs: Any, outputs: Any, views: int) -> Verdict:
        gains = len(chain.operations) > 1 and "cat" not in chain.operations
        return Verdict(gains, "estimates", 1.0 if gains else -1.0)

    monkeypatch.setattr(decision, "judge_for", lambda *args, **kwargs: judge)
    x, angles = torch.randn(5, 8), torch.randn(5, 8)
    module = Code(lambda x, angles: rotary(x, angles.cos() * 2, angles.sin() * 2))
    fused = ct.fuse(module)
    torch.testing.assert_close(fused(x, angles), module(x, angles))
    (chain,) = fused.explain().fused
    assert set(chain.operations) == {"cos", "sin", "mul", "add"}
    assert "what is around it gains alone" in str(fused.explain())


# What is chosen -----------------------------------------------------------------------------------------------------

HALVES = (
    Call("getitem", (Ref(0), ("rest", (None, 32))), (3,)),
    Call("getitem", (Ref(0), ("rest", (32, None))), (4,)),
    Call("neg", (Ref(4),), (5,)),
    Call("cat", ((Ref(5), Ref(3)), -1), (6,)),
)
TURNED = (
    Call("mul", (Ref(0), Ref(1)), (7,)),
    Call("mul", (Ref(6), Ref(2)), (8,)),
    Call("add", (Ref(7), Ref(8), 1), (9,)),
)
ROTARY = Chain(("x", "cos", "sin"), (*HALVES, *TURNED), (9,), (), frozenset())
GATED = Chain(
    ("x",),
    (
        Call("chunk", (Ref(0), 2, -1), (1, 2)),
        Call("gelu", (Ref(2), "none"), (3,)),
        Call("mul", (Ref(1), Ref(3)), (4,)),
    ),
    (4,),
    (),
    frozenset(),
)


def test_views_of_a_product_have_one_cotangent() -> None:
    """Heads of a projection are read whole and in halves: the product's gradient is written once, by one program."""
    inputs = ("x", "w", "cos", "sin")
    numbers = {0: 5, 1: 2, 2: 3}  # of the rotated value, and of cosines and sines

    def renumbered(call: Call) -> Call:
        def number(tree: Any) -> Any:
            if isinstance(tree, Ref):
                return Ref(numbers.get(tree.number, tree.number + 3))
            return tuple(map(number, tree)) if isinstance(tree, tuple) else tree

        return Call(call.rule, number(call.arguments), tuple(n + 3 for n in call.results))

    heads = (Call("linear", (Ref(0), Ref(1), None), (4,)), Call("reshape", (Ref(4), (16, 256, 16, 64)), (5,)))
    chain = Chain(inputs, (*heads, *map(renumbered, (*HALVES, *TURNED))), (12,), (), frozenset())
    shapes = (16, 256, 128), (1024, 128), (16, 256, 1, 64), (16, 256, 1, 64)
    needs = (True, True, False, False)
    backward = Backward(chain.trace([(shape, "bfloat16") for shape in shapes]), needs, Settings())
    plan = backward.plan([without_memory(shape, "bfloat16") for shape in shapes], needs)
    assert plan is not None
    assert [s.kind for s in plan.steps if s.launches] == ["RowProgram", "Gemm", "Gemm"], plan


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("chain", "shapes", "dtype", "measured"),
    [  # microseconds of GPU on an H200, queued behind a kernel: eager and fused, then of both passes
        (ROTARY, [(16, 256, 16, 64), (16, 256, 1, 64), (16, 256, 1, 64)], "bfloat16", (60.6, 11.8, 129, 21.3)),
        (ROTARY, [(16, 256, 16, 64), (16, 256, 1, 64), (16, 256, 1, 64)], "float32", (71.9, 19.4, 165, 39.2)),
        (GATED, [(4096, 6144)], "bfloat16", (78.2, 22.7, 209, 56.2)),
        (GATED, [(4096, 6144)], "float32", (91.4, 39.8, 276, 101)),
    ],
)
def test_estimates_are_near_what_was_measured(
    chain: Chain, shapes: list[Any], dtype: str, measured: tuple[float, ...], training: bool
) -> None:
    graded = (True, *(False for _ in shapes[1:])) if training else ()
    metas = [(shape, dtype) for shape in shapes]
    found = estimate(chain, metas, requires_grad=graded)
    assert found.gains()
    eager, fused = measured[2:] if training else measured[:2]
    assert found.pytorch.gpu * 1e6 == pytest.approx(eager, rel=0.55)
    assert found.fused.gpu * 1e6 == pytest.approx(fused, rel=0.55)
    # Inductor reads and writes the same bytes, in one kernel too.
    compiled = estimate(chain, metas, requires_grad=graded, compiled=True)
    assert compiled.pytorch.gpu == pytest.approx(compiled.fused.gpu, rel=0.4) and not compiled.reason


def test_nothing_is_put_beside_rows() -> None:
    """As what is left of heads that are turned as a whole: an empty part of a tensor, of whatever dtype."""

    def code(x: Any, wide: Any) -> Any:
        half, rest = x[..., :8], x[..., 8:]
        return torch.cat((half * 2, rest), -1), torch.cat((rest, half, half), -1) + 1, torch.cat((half, wide), -1) * 1

    for shape in ((2, 3, 8), (3, 8), (8,)):
        torch._dynamo.reset()
        x, wide = torch.randn(shape, requires_grad=True), torch.empty((*shape[:-1], 0), dtype=torch.float64)
        fused = ct.fuse(Code(code), only_gains=False)
        found = []
        for function in (fused, code):
            results = function(x, wide)
            (grad,) = torch.autograd.grad(sum(y.square().sum() for y in results), x)
            found.append((*results, grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        assert any("cat" in chain.operations for chain in fused.explain().fused)
