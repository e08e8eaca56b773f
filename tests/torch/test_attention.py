"""Attention that PyTorch has a kernel for once masks are contiguous and shared heads are repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import missing_gpu
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

import cupyfuse.torch as ct
from cupyfuse.torch.backend import fuse_graph
from cupyfuse.torch.graphs import attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    """Attention of 8 heads over 2, with a product and an activation behind it, so that there is a chain."""

    def __init__(self, width: int = 16, **options: Any):
        super().__init__()
        self.options, self.width = options, width
        self.queries, self.keys = nn.Linear(32, 8 * width), nn.Linear(32, 2 * width, bias=False)  # its gradient is 0
        self.values, self.last = nn.Linear(32, 2 * width), nn.Linear(8 * width, 32)

    def heads(self, x: Any) -> Any:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = self.heads(self.queries(x)), self.heads(self.keys(x)), self.heads(self.values(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return F.gelu(self.last(y.transpose(1, 2).flatten(2)))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch chooses as on NVIDIA's GPUs, where its kernel for float32 takes as many heads of each."""

    def choose(q: Any, k: Any, v: Any, mask: Any, enable_gqa: bool = False, **options: Any) -> int:
        alike = q.shape[1] == k.shape[1] == v.shape[1] and not enable_gqa
        contiguous = all(t.stride(-1) == 1 for t in (q, k, v, mask) if t is not None)
        dtype = q.dtype in (torch.float32, torch.bfloat16)
        return (SDPBackend.EFFICIENT_ATTENTION if alike and contiguous and dtype else SDPBackend.MATH).value

    monkeypatch.setattr(attention, "_choose", choose)


def run(block: nn.Module, *args: Any) -> list[Any]:
    """Return the output and all gradients."""
    x, *others = args
    x = x.clone().requires_grad_()
    block.zero_grad()
    out = block(x, *others)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in block.parameters())]


def assert_as_close(found: list[Any], theirs: list[Any], exact: list[Any]) -> None:
    """Errors are those of PyTorch's own kernels, twice; those of 16 bits round the shares of the softmax."""
    for ours, eager, wide in zip(found, theirs, exact, strict=True):
        allowed = 2 * (eager - wide).norm() + 4 * torch.finfo(ours.dtype).eps * wide.norm()
        assert (ours - wide).norm() <= allowed


def repeated(fused: Any, operation: str = "repeat_interleave") -> int:
    """How many tensors of keys or values a fused module repeats, in all captures, or copies."""
    return sum(part.operations.count(operation) for part in fused.explain().left)


class Biased(nn.Module):
    """Two layers of attention that add a learned bias to the scores, whose last dimension in memory is the heads."""

    def __init__(self, dtype: Any = None):
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(32, 96, dtype=dtype) for _ in range(2))
        self.bias = nn.Embedding(15, 4, dtype=dtype)

    def forward(self, x: Any, write: bool = False) -> Any:
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(place[:, None] - place + 7).permute(2, 0, 1).unsqueeze(0)
        for layer in self.inputs:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
            x = F.gelu(y.transpose(1, 2).flatten(2) + x)
            if write:
                bias.mul_(0.5)
        return x


def lower_triangle(x: Any) -> Any:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True), (False, False)])
def test_shared_heads_are_repeated(as_on_a_gpu: None, causal: bool, masked: bool) -> None:
    block = Block(enable_gqa=True, is_causal=causal)
    fused = ct.fuse(copy.deepcopy(block))
    for batch in (3, 5, 2):  # the second one makes its size a symbol
        x = torch.randn(batch, 7, 32)
        mask = (lower_triangle(x),) if masked else ()
        for found, expected in zip(run(fused, x, *mask), run(block, x, *mask), strict=True):
            torch.testing.assert_close(found, expected)
    assert repeated(fused) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", [False, True])
def test_masks_are_copied(as_on_a_gpu: None, dtype: torch.dtype, write: bool) -> None:
    model = Biased(dtype)
    fused = ct.fuse(copy.deepcopy(model))
    x = torch.randn(3, 7, 32).to(dtype)
    exact = run(copy.deepcopy(model).double(), x.double(), write)
    assert_as_close(run(fused, x, write), run(model, x, write), exact)
    assert repeated(fused, "contiguous") == (2 if write else 1)  # one for both layers
    with torch.no_grad():
        assert_as_close([fused(x, write)], [model(x, write)], exact[:1])


def test_copies_are_of_the_modes_that_read_them(as_on_a_gpu: None) -> None:
    class Switched(Biased):
        def forward(self, x: Any, write: bool = False) -> Any:
            place = torch.arange(x.shape[1])
            bias = self.bias(place[:, None] - place + 7).permute(2, 0, 1).unsqueeze(0)
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.inputs[0](x).chunk(3, -1))
            with torch.no_grad():
                first = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return F.gelu(first + F.scaled_dot_product_attention(q, k, v, attn_mask=bias))

    model = Switched()
    fused = ct.fuse(copy.deepcopy(model))
    x = torch.randn(3, 7, 32)
    model.inputs.requires_grad_(False), fused.inputs.requires_grad_(False)
    fused(x).sum().backward(), model(x).sum().backward()
    torch.testing.assert_close(fused.bias.weight.grad, model.bias.weight.grad)
    assert repeated(fused, "contiguous") == 2


class Separate(nn.Module):
    """Attention of queries, keys and values that code copies to contiguous memory, as Whisper's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any, case: str = "") -> Any:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in self.inputs)
        if case == "rows of other lengths":  # of 9 elements: not aligned
            q, k, v = (F.pad(t, (0, 1))[..., :8] for t in (q, k, v))
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = F.scaled_dot_product_attention(q, k, k if case == "keys for values" else v)
        if case == "read again":
            y = y * 2 + q + k + v
        return F.gelu(y.transpose(1, 2).flatten(2))


COPIES = {"": 0, "keys for values": 1, "read again": 3, "rows of other lengths": 3}


@pytest.mark.parametrize("case", COPIES)
def test_needless_copies_are_left_out(as_on_a_gpu: None, case: str) -> None:
    model = Separate()
    fused, x = ct.fuse(copy.deepcopy(model)), torch.randn(3, 7, 32)
    model.inputs[2].requires_grad_(case != "keys for values"), fused.inputs[2].requires_grad_(case != "keys for values")
    found, expected = run(fused, x, case), run(model, x, case)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert repeated(fused, "contiguous") == COPIES[case]


def test_copies_of_what_changes_are_kept(as_on_a_gpu: None) -> None:
    class Changing(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            held = q.transpose(1, 2).contiguous()
            q.mul_(0)
            y = F.scaled_dot_product_attention(held, k, k)
            return F.gelu(y) + q.transpose(1, 2)

    q, k = torch.randn(2, 7, 4, 8), torch.randn(2, 4, 7, 8)
    expected = Changing()(q.clone(), k)
    torch.testing.assert_close(ct.fuse(Changing())(q.clone(), k), expected)


TAILS = {
    "returned": lambda y: y,
    "viewed": lambda y: y.view(-1, *y.shape[2:]),
    "computed with": lambda y: (y * 2).view(-1, *y.shape[2:]),
    "copied and changed": lambda y: y.transpose(1, 2).contiguous().mul_(2),
    "copied and returned": lambda y: y.transpose(1, 2).contiguous(),
    "changed": lambda y: y.mul_(2),
    "flattened": lambda y: y.transpose(1, 2).flatten(2).sin(),
    "in another order": lambda y: y.permute(0, 3, 2, 1).flatten(2).sin(),
}


class Ending(nn.Module):
    """Attention with a tail: of copied queries, or of those whose last dimension is not contiguous."""

    def __init__(self, tail: Any, copies: bool):
        super().__init__()
        self.tail, self.copies = tail, copies
        self.inputs = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in self.inputs)
        if self.copies:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        else:
            q = q.transpose(-2, -1).contiguous().transpose(-2, -1)
        return self.tail(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_results_lie_in_memory_as_in_eager(tail: str, copies: bool) -> None:
    """PyTorch's CPU kernel, too, gives results in the order of the queries, and reads them in the backward pass."""
    model = Ending(TAILS[tail], copies)
    fused = ct.fuse(copy.deepcopy(model))

    def run_and_change(module: nn.Module) -> list[Any]:
        x = torch.linspace(-1, 1, 3 * 7 * 32).sin().view(3, 7, 32).requires_grad_()
        out = module(x)
        found = [out.detach().clone()]
        if tail == "copied and returned":
            out.data.mul_(3)
        out.square().sum().backward()
        return [*found, x.grad, *(p.grad for p in module.parameters())]

    if tail == "changed" and copies:  # the kernel's backward pass reads the result
        with pytest.raises(RuntimeError, match="inplace"):
            run_and_change(model)
        with pytest.raises(RuntimeError, match="inplace"):
            run_and_change(fused)
        return
    for ours, theirs in zip(run_and_change(fused), run_and_change(model), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert fused(torch.ones(3, 7, 32)).stride() == model(torch.ones(3, 7, 32)).stride()


def test_callers_may_change_what_is_copied() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            y = F.scaled_dot_product_attention(q.transpose(1, 2).contiguous(), k, v)
            return F.gelu(self.last(y.transpose(1, 2).flatten(2).unflatten(2, (4, 8))))

    def gradient(module: nn.Module) -> Any:
        q, k, v = torch.ones(2, 7, 4, 8), torch.linspace(-1, 1, 448).view(2, 4, 7, 8).requires_grad_(), None
        v = k.detach().cos()
        y = module(q, k, v)
        q.data.zero_()
        y.sum().backward()
        return k.grad

    model = Given()
    torch.testing.assert_close(gradient(ct.fuse(copy.deepcopy(model))), gradient(model))


_WITHOUT_HEADS = [(2, 0, 5, 8)] if torch.__version__ >= (2, 12) else []  # PyTorch 2.11 divides by their number


@pytest.mark.filterwarnings("error:cupyfuse left a captured graph")
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), *_WITHOUT_HEADS, (0, 4, 5, 8), (2, 4, 0, 8)], ids=str)
def test_other_ranks_and_no_elements(shape: tuple[int, ...]) -> None:
    class Small(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return F.gelu(F.scaled_dot_product_attention(q, k, k, enable_gqa=q.dim() > 3) * 2) + 1

    q, k = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(ct.fuse(Small())(q, k), Small()(q, k))


def test_graphs_of_the_backend_repeat_them(as_on_a_gpu: None) -> None:
    block = Block(enable_gqa=True, is_causal=True)
    seen: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        fuse_graph(module.graph, only_gains=False)
        module.recompile()
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    x = torch.randn(3, 7, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(block, backend=backend)(x), block(x))
    assert seen.count("repeat_interleave") == 2
    seen.clear()
    torch.compile(Block(enable_gqa=True), backend=backend)(x)  # not causal, with gradients: Inductor is faster
    assert seen.count("repeat_interleave") == 0


def test_graphs_of_the_backend_take_scales_of_sizes() -> None:
    class Scaled(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return F.gelu(F.scaled_dot_product_attention(q, k, k, scale=q.shape[-1] ** -0.5) * 2)

    def backend(module: Any, inputs: Any) -> Any:
        fuse_graph(module.graph, only_gains=False)
        module.recompile()
        return module

    compiled = torch.compile(Scaled(), backend=backend, dynamic=True)
    for width in (8, 16):
        q, k = torch.randn(2, 3, 4, width), torch.randn(2, 3, 7, width)
        torch.testing.assert_close(compiled(q, k), Scaled()(q, k))


def test_numbers_that_change_leave_chains_around_attention(recwarn: pytest.WarningsRecorder) -> None:
    class Scaled(nn.Module):
        def forward(self, q: Any, k: Any, scale: float) -> Any:
            return F.gelu(F.scaled_dot_product_attention(q, k, k, scale=scale) * 2)

    fused, q, k = ct.fuse(Scaled()), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    for scale in (0.3, 0.5, 0.7):
        torch.testing.assert_close(fused(q, k, scale), Scaled()(q, k, scale))
    assert not recwarn.list
    assert len(fused.explain().fused) == 2  # the second one makes the scale a symbol


def test_operands_without_heads_leave_chains_around_attention(recwarn: pytest.WarningsRecorder) -> None:
    class Plain(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return F.gelu(F.scaled_dot_product_attention(q, k, k) * 2)

    fused, q, k = ct.fuse(Plain()), torch.randn(4, 8), torch.randn(5, 8)
    torch.testing.assert_close(fused(q, k), Plain()(q, k))
    assert not recwarn.list
    assert fused.explain().fused


def test_keys_of_as_many_heads_are_not_copied(as_on_a_gpu: None) -> None:
    block = Block(enable_gqa=True)
    block.keys = nn.Linear(32, 8 * 16, bias=False)
    fused, x = ct.fuse(copy.deepcopy(block)), torch.randn(3, 7, 32)
    torch.testing.assert_close(fused(x), block(x))
    assert repeated(fused) == 1  # the values


def test_graphs_without_a_chain_repeat_them_too(as_on_a_gpu: None) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True)

    class Alone(nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v)

    q, k, v = torch.randn(2, 6, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 3, 5, 16)
    fused = ct.fuse(Alone())
    torch.testing.assert_close(fused(q, k, v), attend(q, k, v))
    assert repeated(fused) == 2


LEFT = {
    "as many heads of each": ({}, 16),
    "dropout": ({"enable_gqa": True, "is_causal": True, "dropout_p": 0.1}, 16),
    "many elements a head, with gradients": ({"enable_gqa": True}, 256),
}


@pytest.mark.parametrize("case", LEFT)
def test_calls_that_are_left(as_on_a_gpu: None, case: str) -> None:
    options, width = LEFT[case]
    block = Block(width, **options)
    if not options:
        block.keys, block.values = nn.Linear(32, 8 * width), nn.Linear(32, 8 * width)
    fused, x = ct.fuse(copy.deepcopy(block)), torch.randn(3, 7, 32)
    torch.manual_seed(1)
    found = fused(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, block(x))
    assert repeated(fused) == 0


def test_a_head_of_many_elements_is_repeated_where_it_gains(as_on_a_gpu: None) -> None:
    fused, causal = ct.fuse(Block(256, enable_gqa=True)), ct.fuse(Block(256, enable_gqa=True, is_causal=True))
    x = torch.randn(3, 7, 32)
    with torch.no_grad():
        fused(x)
    causal(x)
    assert repeated(fused) == repeated(causal) == 2


def test_other_dtypes_and_deterministic_algorithms_are_left(as_on_a_gpu: None) -> None:
    block, x = Block(enable_gqa=True, is_causal=True), torch.randn(3, 7, 32)
    wide = ct.fuse(copy.deepcopy(block).double())
    torch.testing.assert_close(wide(x.double()), copy.deepcopy(block).double()(x.double()))
    torch.use_deterministic_algorithms(True)
    try:
        exact = ct.fuse(block)
        exact(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert repeated(wide) == repeated(exact) == 0


def test_cpu_kernels_take_shared_heads() -> None:
    fused = ct.fuse(Block(enable_gqa=True, is_causal=True))
    fused(torch.randn(3, 7, 32))
    assert repeated(fused) == 0


@pytest.mark.gpu
@pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu() or "there is a GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_runs_its_kernel(masked: bool) -> None:
    block = Block(64, enable_gqa=True, is_causal=not masked).cuda()
    fused, x = ct.fuse(copy.deepcopy(block)), torch.randn(3, 70, 32, device="cuda")
    mask = (lower_triangle(x),) if masked else ()
    exact = run(copy.deepcopy(block).double(), x.double(), *mask)
    assert_as_close(run(fused, x, *mask), run(block, x, *mask), exact)
    assert repeated(fused) == 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused(x, *mask)
        torch.cuda.synchronize()
    assert any("fmha" in event.key for event in profile.key_averages())


@pytest.mark.gpu
@pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu() or "there is a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_takes_copied_masks(dtype: torch.dtype) -> None:
    model = Biased(dtype).cuda()
    fused, x = ct.fuse(copy.deepcopy(model)), torch.randn(3, 7, 32, device="cuda").to(dtype)
    exact = run(copy.deepcopy(model).double(), x.double())
    assert_as_close(run(fused, x), run(model, x), exact)
    assert repeated(fused, "contiguous") == 1
