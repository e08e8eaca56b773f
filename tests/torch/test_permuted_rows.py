"""Operations on tensors with permuted dimensions, which are computed in the order of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import permuted_programs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyfuse.torch as ct
from cupyfuse.torch.backend import fuse_module
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.graphs.inplace import functionalise, restore_in_place
from cupyfuse.torch.graphs.lowering import Direct
from cupyfuse.torch.graphs.partition import Verdict
from cupyfuse.torch.graphs.views import rewrite_views

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, SIZE = 3, 8


def rotate_half(x: Any) -> Any:
    return torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + rotate_half(x) * sin


class Heads(nn.Module):
    """A projection to heads, (b, h, l, d) in the memory of (b, l, h, d), and code for what follows."""

    def __init__(self, code: Callable[..., Any]):
        super().__init__()
        self.code = code
        self.project = nn.Linear(12, HEADS * SIZE)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        q = self.project(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
        return self.code(self, q, cos, sin)


def operands(batch: int = 2, length: int = 5) -> tuple[Any, Any, Any]:
    torch.manual_seed(batch + length)
    angles = torch.randn(batch, 1, length, SIZE)
    return torch.randn(batch, length, 12), angles.cos(), angles.sin()


def rewritten(code: Any, *arguments: Any) -> tuple[Any, list[Any]]:
    """Run captured code with its views rewritten, and no chains; return the results and the graph's nodes."""
    nodes: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        functionalise(module.graph)
        rewrite_views(module.graph)
        restore_in_place(module.graph, ())
        module.graph.lint()
        module.recompile()
        nodes.extend(module.graph.nodes)
        return module.forward

    return torch.compile(code, backend=backend, fullgraph=True, dynamic=False)(*arguments), nodes


def names(nodes: list[Any]) -> list[str]:
    """Name the calls of a graph, with the shapes of their results."""
    calls = [n for n in nodes if n.op.startswith("call")]
    shapes = [getattr(n.meta.get("example_value"), "shape", ()) for n in calls]
    targets = [n.target if isinstance(n.target, str) else n.target.__name__ for n in calls]
    return [f"{target} {'x'.join(map(str, shape))}" for target, shape in zip(targets, shapes, strict=True)]


def _strides(tensor: Any) -> list[int]:
    """Return the strides of dimensions longer than one."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def run(module: Any, arguments: Any) -> list[Any]:
    """Return the results and all gradients."""
    module.zero_grad()
    x = arguments[0].detach().requires_grad_()
    found = module(x, *arguments[1:])
    found = list(found) if isinstance(found, tuple) else [found]
    sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in found).backward()
    return [*found, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def check(code: Callable[..., Any], arguments: Any = None) -> list[str]:
    """Compare code with eager, rewritten and fused; return the calls of the rewritten graph."""
    module = Heads(code)
    arguments = arguments or operands()
    with torch.no_grad():
        theirs = module(*arguments)
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    with torch.no_grad():
        ours, nodes = rewritten(module, *arguments)
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    with torch.no_grad():
        again = fused(*arguments)
    for found in (ours, again):
        found = found if isinstance(found, tuple) else (found,)
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b)
            assert (_strides(a), a.dtype) == (_strides(b), b.dtype)
    for a, b in zip(run(fused, arguments), run(module, arguments), strict=True):
        torch.testing.assert_close(a, b)
    return names(nodes)


def test_a_rotary_embedding_is_of_rows_in_memory() -> None:
    assert check(lambda m, q, cos, sin: rotate(q, cos, sin)) == [
        "linear 2x5x24",
        "view 2x5x3x8",
        "permute 2x5x1x8",
        "mul 2x5x3x8",
        "getitem 2x5x3x4",
        "neg 2x5x3x4",
        "getitem 2x5x3x4",
        "cat 2x5x3x8",
        "permute 2x5x1x8",
        "mul 2x5x3x8",
        "add 2x5x3x8",
        "permute 2x3x5x8",
    ]


def _twice(m: Any, q: Any, cos: Any, sin: Any) -> Any:
    return rotate(rotate(q, cos, sin), cos, sin)


def _cast(m: Any, q: Any, cos: Any, sin: Any) -> Any:
    return rotate(q.double(), cos, sin).to(q.dtype)


def _in_place(m: Any, q: Any, cos: Any, sin: Any) -> Any:
    y = q * cos
    y += rotate_half(q) * sin
    return y.mul_(2)


def _of_parts(m: Any, q: Any, cos: Any, sin: Any) -> Any:
    first, second = q.chunk(2, dim=-1)
    c, s = cos[0, 0], sin[:1].narrow(-1, 0, SIZE)
    return q * c + torch.cat((second * -1, first), 3) * s


def _views_without_gradients(m: Any, q: Any, cos: Any, sin: Any) -> Any:
    with torch.no_grad():
        part = q.transpose(1, 2).transpose(1, 2)
    y = part * cos + q
    with torch.no_grad():
        rows = y.transpose(1, 2)
    return y, rows.exp() * 2


COMPUTED: dict[str, Callable[..., Any]] = {
    "the cosines of all": lambda m, q, cos, sin: rotate(q, cos[:1], sin[:1]),
    "without dimensions of one": lambda m, q, cos, sin: rotate(q, cos[0, 0], sin[0, 0]),
    "twice": _twice,
    "numbers and rows": lambda m, q, cos, sin: (q * m.scale - 1) * 2,
    "another dtype": _cast,
    "in place": _in_place,
    "parts": _of_parts,
    "every other element": lambda m, q, cos, sin: q - torch.cat((q[..., ::2].sin(), q[..., 1::2].cos()), -1),
    "both are returned": lambda m, q, cos, sin: (lambda y: (y, F.silu(y)))(rotate(q, cos, sin)),
    "heads that are added up": lambda m, q, cos, sin: (rotate(q, cos, sin) + q * m.scale).transpose(1, 2).flatten(2),
    "a part is returned": lambda m, q, cos, sin: (q[..., :2], rotate(q, cos, sin)),
    "a copy of the operand": lambda m, q, cos, sin: rotate(q.clone(), cos, sin),
}


@pytest.mark.parametrize("case", COMPUTED)
@pytest.mark.parametrize("shape", [(2, 5), (1, 4), (3, 1), (1, 1)], ids=str)
def test_they_are_computed_in_the_order_of_memory(case: str, shape: tuple[int, int]) -> None:
    calls = check(COMPUTED[case], operands(*shape))
    if shape[1] > 1:  # otherwise both orders are one
        rest = [call for call in calls if "x3x5x" in call or "x3x4x" in call]
        assert {call.split()[0] for call in rest} <= {"permute", "transpose", "getitem", "float"}


LEFT: dict[str, Callable[..., Any]] = {
    "an operand in C order": lambda m, q, cos, sin: rotate(q, cos, sin) + q.contiguous(),
    "one operation": lambda m, q, cos, sin: F.silu(q.view_as(q).unsqueeze(0)),
    "what is inside is returned": lambda m, q, cos, sin: (lambda h: (q.sin() + h * sin, h))(rotate_half(q)),
    "heads in another order": lambda m, q, cos, sin: torch.cat((q[:, 1:], q[:, :1]), 1) * sin + q.flip(1).exp(),
    "a norm of each row": lambda m, q, cos, sin: F.layer_norm(q.sin() * cos, (SIZE,)),
    "by the root of a mean": lambda m, q, cos, sin: q.sin() * torch.rsqrt(q.sin().pow(2).mean(-1, keepdim=True) + 1),
    "written to behind a view": lambda m, q, cos, sin: (lambda y: (y + 1, y.transpose(1, 2).mul_(2)))(q * cos),
}


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_and_right(case: str) -> None:
    assert not any(call.startswith("permute") for call in check(LEFT[case]))


def test_a_view_of_the_result_shares_its_memory() -> None:
    def code(m: Any, q: Any, cos: Any, sin: Any) -> Any:
        y = rotate(q, cos, sin)
        return y, y.transpose(1, 2), y[:, :1], y.transpose(1, 2)

    for fused in (ct.fuse(Heads(code), only_gains=False), lambda *given: rewritten(Heads(code), *given)[0]):
        with torch.no_grad():
            y, rows, part, again = fused(*operands())
        assert rows is not again
        y.zero_()
        assert not rows.any() and not part.any()


def test_heads_of_other_numbers_of_tokens_share_a_graph() -> None:
    module = Heads(lambda m, q, cos, sin: rotate(q, cos, sin))
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    for shape in ((2, 5), (3, 7), (4, 9), (2, 1), (1, 6), (0, 3)):
        for a, b in zip(run(fused, operands(*shape)), run(module, operands(*shape)), strict=True):
            torch.testing.assert_close(a, b)


def test_views_that_were_taken_without_gradients_have_none() -> None:
    module = Heads(_views_without_gradients)
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    for a, b in zip(run(fused, operands()), run(module, operands()), strict=True):
        torch.testing.assert_close(a, b)


def test_writes_stay_that_only_unread_operations_read() -> None:
    def code(m: Any, q: Any, cos: Any, sin: Any) -> Any:
        y = m.project(m.project.weight.new_ones(2, 5, 12)).view(2, 5, HEADS, SIZE).transpose(1, 2)
        written = y.mul_(cos)
        (written * 2 + q).transpose(1, 2)
        return y.flip(1) - q.flip(1)

    check(code)


def test_dtypes_of_autocast() -> None:
    module = Heads(lambda m, q, cos, sin: (rotate(q, cos, sin).exp(), rotate_half(q) + q))
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused(*operands()), module(*operands())
    for a, b in zip(ours, theirs, strict=True):
        assert (_strides(a), a.dtype) == (_strides(b), b.dtype)
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def _results(program: Any, inputs: list[Any], gradients: bool) -> tuple[list[Any], list[Any]]:
    """Return what a program returns and what it makes of its inputs, with gradients; and what is to be the same."""
    given = [torch.empty_like(v).copy_(v).requires_grad_(gradients) for v in inputs]
    with torch.set_grad_enabled(gradients):
        found = program(*given)
    same = [(y.dtype, y.shape, _strides(y), y.requires_grad) for y in found]
    values = [v.detach().clone() for v in (*found, *given)]
    terms = [(y.double().flatten() * torch.linspace(-1, 1, y.numel())).sum() for y in found if y.requires_grad]
    if terms:
        grads = torch.autograd.grad(sum(terms), given, allow_unused=True, materialize_grads=True, create_graph=True)
        values += [g.detach() for g in grads]
        if any(g.requires_grad for g in grads):
            second = sum(g.sin().sum() for g in grads)
            values += torch.autograd.grad(second, given, allow_unused=True, materialize_grads=True)
    return values, same


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int, gradients: bool) -> None:
    program = permuted_programs.random_program(seed)
    try:
        values, same = _results(program, program.inputs, gradients)
    except RuntimeError:
        return  # it writes to what eager's backward pass reads

    def unfused(*given: Any) -> Any:
        return rewritten(lambda *inputs: program(*inputs), *given)[0]

    class Module(nn.Module):
        def forward(self, *given: Any) -> Any:
            return program(*given)

    ways = [unfused, ct.fuse(Module(), only_gains=False)] if seed % 4 == 0 else [unfused]
    for way in ways:
        found, alike = _results(way, program.inputs, gradients)
        assert alike == same
        for a, b in zip(found, values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def fused_calls(code: Any, gains: Callable[[Any], bool], *arguments: Any) -> tuple[list[str], list[int]]:
    """Fuse captured code, with the chains that gain; return the graph's calls, and the counts of inserted views."""
    calls: list[str] = []
    counts: list[int] = []

    def judge(chain: Any, inputs: Any, outputs: Any, views: int) -> Verdict:
        counts.append(views)
        return Verdict(gains(chain), saved=1.0)

    def backend(module: Any, _: Any) -> Any:
        (found,) = fuse_module(module, Direct(Options()), judge)
        assert not found.failure and not found.reordered_in_vain
        calls.extend(name.split()[0] for name in names(module.graph.nodes))
        return module.forward

    compiled = torch.compile(code, backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*arguments), code(*arguments))
    return calls, counts


def heads() -> Any:
    """Draw (b, h, l, d) in the memory of (b, l, h, d)."""
    torch.manual_seed(3)
    return torch.randn(2, 5, HEADS, SIZE).transpose(1, 2)


def test_what_no_chain_has_keeps_its_order() -> None:
    """Of two groups of operations, the chain of one alone gains: the other's are in the order that they were in."""

    def code(x: Any, y: Any) -> Any:
        return (x * 2 + 1).exp(), (y * 3).sigmoid().sqrt()

    x, y = heads(), heads()
    calls, _ = fused_calls(code, lambda chain: "exp" in chain.operations, x, y)
    assert sorted(calls) == ["chain", "mul", "permute", "permute", "sigmoid", "sqrt"]
    calls, counts = fused_calls(code, lambda chain: True, x, y)
    assert sorted(calls) == ["chain"] * 2 + ["permute"] * 4
    assert counts == [2, 2], "of the operand, and of the result"


def test_images_that_no_chain_has_keep_their_order() -> None:
    def code(x: Any, y: Any) -> Any:
        return (x * 2 + 1).exp(), (y * 3).sigmoid().sqrt()

    x, y = (torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last) for _ in range(2))
    calls, _ = fused_calls(code, lambda chain: "exp" in chain.operations, x, y)
    assert calls.count("chain") == 1 and calls.count("permute") == 2
    assert {"mul", "sigmoid", "sqrt"} <= set(calls)
