"""Modules of all kinds, whole models, and what people do with modules: nothing but the speed differs."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import missing_gpu
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_support import fused_chains
from torch_ways import Code, graded, operators, plain, same, ways

import cupyfuse.torch as ct
from cupyfuse.torch.explain import Explanation, Part

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# Results, numbers, devices ------------------------------------------------------------------------------------------


SEVERAL: dict[str, Any] = {
    "var_mean": lambda x: torch.var_mean(x.exp(), -1),
    "both are used": lambda x: (lambda v, m: (v + m.exp()).sin())(*torch.var_mean(x.exp(), -1)),
    "the second alone": lambda x: torch.var_mean(x.exp(), -1)[1].exp(),
    "max": lambda x: (lambda y: (y.values.exp() * 2, y.indices))(x.exp().max(-1)),
    "its values": lambda x: x.exp().max(-1).values.exp(),
    "topk": lambda x: [*torch.topk(x.softmax(-1), 2)],
    "sort": lambda x: [*(x * 2).exp().sort(-1)],
    "split": lambda x: (lambda a, b: (F.silu(a) * b).softmax(-1))(*x.split(6, -1)),
    "chunk": lambda x: (lambda a, b: F.gelu(a) * b)(*(x * 2).chunk(2, -1)),
    "unbind": lambda x: [y.softmax(-1).exp() for y in (x * 2).exp().unbind(0)],
    "used as one": lambda x: torch.cat(x.exp().split(6, -1)).softmax(-1).exp(),
}


@pytest.mark.rotates
@ways
@pytest.mark.parametrize("name", SEVERAL)
def test_operations_with_several_results(name: str, way: str) -> None:
    same(Code(lambda m, x: SEVERAL[name](m.linear(x))), graded, way)


@pytest.mark.rotates
@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: (x[x > 0] * 2).exp().softmax(-1),
        lambda m, x: (m.linear(x) * x.sum().item()).softmax(-1).exp(),
        lambda m, x: (m.linear(x) * x.shape[0]).softmax(-1) + x.size(1) / 2,
        lambda m, x: x.shape[0] * 2,
        lambda m, x: (torch.empty(5, 12, device="meta").exp().softmax(-1).shape[0], m.linear(x).exp().softmax(-1)),
    ],
    ids=["nonzero", "item", "sizes", "no tensor", "meta"],
)
@pytest.mark.parametrize("captured", [False, True])
def test_numbers_that_are_not_known_before(code: Any, captured: bool, recwarn: pytest.WarningsRecorder) -> None:
    module = Code(code)
    fused = ct.fuse(module)
    options = {"capture_dynamic_output_shape_ops": captured, "capture_scalar_outputs": captured}
    with torch._dynamo.config.patch(**options):
        for rows in (5, 6, 7):
            x = torch.randn(rows, 12)
            torch.testing.assert_close(fused(x), module(x), rtol=1e-4, atol=1e-5)
    assert not [w for w in recwarn if "cupyfuse" in str(w.message)]


@pytest.mark.gpu
@ways
def test_tensors_on_several_devices(way: str) -> None:
    if missing_gpu():
        pytest.skip(missing_gpu())
    module = Code(lambda m, x: (m.linear(x) * torch.tensor(2.0)).softmax(-1) * torch.ones((), device="cpu")).to("cuda")
    same(module, lambda: (torch.randn(5, 12, device="cuda", requires_grad=True),), way)


# Whole models -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, p: float = 0.1):
        super().__init__()
        self.norm, self.fc1, self.fc2, self.drop = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.Dropout(p)
        self.attention, self.first = nn.Linear(12, 36), nn.LayerNorm(12)

    def forward(self, x: Any) -> Any:
        q, k, v = self.attention(self.first(x)).split(12, -1)
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Toy(nn.Module):
    def __init__(self, layers: int = 12, regions: bool = False):
        super().__init__()
        self.embedding, self.head, self.regions = nn.Embedding(50, 12), nn.Linear(12, 50), regions
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, i: Any) -> Any:
        x = self.embedding(i)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.regions else block(x)
        return self.head(x).log_softmax(-1)


def test_a_block_is_one_chain_where_nothing_is_dropped() -> None:
    class Feedforward(Block):
        def forward(self, x: Any) -> Any:
            return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))

    fused = ct.fuse(Feedforward()).eval()
    fused(torch.randn(2, 5, 12))
    (chain,) = fused_chains(fused)
    assert [name for name in chain if name != "identity"] == ["layer_norm", "linear", "gelu", "linear", "add"]
    fused.train()(torch.randn(2, 5, 12))
    assert ("layer_norm", "linear", "gelu", "linear") in fused_chains(fused)


@pytest.mark.rotates
def test_explanations_fit_on_a_screen() -> None:
    fused = ct.fuse(Toy()).eval()
    fused(torch.randint(0, 50, (2, 5)))
    text = str(ct.explain(fused))
    assert len(text.splitlines()) < 24 and max(map(len, text.splitlines())) <= 130
    assert "11 × " in text and "blocks.*" in text and "captured" not in text
    reasons = Explanation((), (Part("m", ("transpose",), (), "a reason of many words " * 20),))
    assert max(map(len, str(reasons).splitlines())) <= 130 and str(reasons).count("reason") == 20
    count = len(ct.explain(fused).fused)
    fused(torch.randint(0, 50, (3, 7)))
    assert len(ct.explain(fused).fused) == count and "captured 2 times" in str(ct.explain(fused))


@pytest.mark.parametrize("regions", [False, True])
def test_training_a_model(regions: bool) -> None:
    module = Toy(3, regions)
    fused, i = ct.fuse(copy.deepcopy(module)), torch.randint(0, 50, (2, 5))
    found = []
    for each in (module, fused):
        torch.manual_seed(2)
        y = each(i)
        torch.manual_seed(9)  # of no effect on what is computed once more
        y.sin().sum().backward()
        found.append([y.detach(), *(p.grad for p in each.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert len(fused_chains(fused)) >= 6


# Modules of all kinds -----------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    y: Any
    z: Any = None


torch.utils._pytree.register_dataclass(Output)


def shaped(*shape: int) -> Any:
    return lambda: (torch.randn(shape),)


def _autocast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (F.gelu(m.linear(x)) * 0 + 1).softmax(-1), m.linear(x).exp() * 0


KINDS: dict[str, tuple[Any, Any]] = {
    "transformer": (
        lambda: nn.Transformer(12, 2, 1, 1, 24, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 5, 12), torch.randn(2, 4, 12)),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 2).eval(),
        shaped(2, 5, 12),
    ),
    "attention": (
        lambda: Code(
            lambda m, x: m.a(m.linear(x), x, x)[0].softmax(-1).exp(), a=nn.MultiheadAttention(12, 2, batch_first=True)
        ),
        shaped(2, 5, 12),
    ),
    "recurrent": (lambda: Code(lambda m, x: m.r(m.linear(x))[0].softmax(-1).exp(), r=nn.GRU(12, 7)), shaped(2, 5, 12)),
    "bag": (
        lambda: Code(lambda m, i: m.linear(m.e(i)).softmax(-1), e=nn.EmbeddingBag(9, 12)),
        lambda: (torch.randint(0, 9, (4, 3)),),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, 5), nn.LogSoftmax(-1),
        ),
        shaped(2, 3, 8, 8),
    ),
    "statistics that are shared": (
        lambda: Code(lambda m, x: m.n(F.gelu(m.n(m.linear(x)))).softmax(-1), n=nn.BatchNorm1d(12)),
        graded,
    ),
    "identity": (nn.Identity, plain),
    "dictionary": (lambda: Code(lambda m, x: {"y": m.linear(x).softmax(-1).exp(), "n": None}), graded),
    "dataclass": (lambda: Code(lambda m, x: Output(m.linear(x).softmax(-1).exp())), graded),
    "namedtuple": (lambda: Code(lambda m, x: Pair(m.linear(x).softmax(-1).exp(), 3)), graded),
    "nothing": (lambda: Code(lambda m, x: None), graded),
    "no tensors": (lambda: Code(lambda m, x: x + 1), lambda: (3,)),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 12)), nn.GELU(), nn.Softmax(-1)),
        graded,
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 12)), nn.GELU(), nn.Softmax(-1)),
        graded,
    ),
    "autocast": (lambda: Code(_autocast), graded),
}  # fmt: skip


@pytest.mark.rotates
@ways
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_all_kinds(kind: str, way: str) -> None:
    same(KINDS[kind][0](), KINDS[kind][1], way)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        return (F.gelu(self.linear(x)) * scale).softmax(-1)


def test_lazy_and_scripted_parts() -> None:
    x = torch.randn(5, 12)
    for part in (nn.LazyLinear(12), torch.jit.trace(nn.Sequential(nn.Linear(12, 12), nn.Tanh()), x)):
        module = nn.Sequential(part, nn.GELU(), nn.Softmax(-1))
        fused = ct.fuse(module)
        torch.testing.assert_close(fused(x), module(x))
        fused(x)[:, 0].sum().backward()


def test_modes_around_calls() -> None:
    module, x = Head(), torch.randn(5, 12)
    fused = ct.fuse(module)
    for on in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            got, want = fused(x), module(x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    with torch.inference_mode():
        assert fused(x).is_inference()
        torch.testing.assert_close(fused(torch.randn(5, 12)).sum(), torch.tensor(5.0))
    with torch.no_grad():
        assert not fused(x).requires_grad
    assert fused(x).requires_grad


def _stored(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


PASS_THROUGH = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _stored, ct.fuse, nn.DataParallel]


@pytest.mark.parametrize("way", PASS_THROUGH)
def test_copies_of_fused_modules(way: Any) -> None:
    fused, x = ct.fuse(Head()), torch.randn(5, 12)
    want = fused(x)
    torch.testing.assert_close(
        way(fused)(x), want, check_device=False
    )  # `DataParallel` goes to the GPUs that there are


def test_export_of_fused_modules() -> None:
    fused, x = ct.fuse(Head()), torch.randn(5, 12)
    want = fused(x)
    exported = torch.export.export(fused, (x,))
    torch.testing.assert_close(exported.module()(x), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "tracer",
    [
        lambda m, x: torch.jit.trace(m, (x,)),
        lambda m, x: torch.fx.symbolic_trace(m),
        lambda m, x: make_fx(m)(x),
    ],
    ids=["torch.jit.trace", "torch.fx", "make_fx"],
)
def test_tracers_see_operations_of_pytorch(tracer: Any) -> None:
    inner, x = ct.fuse(Head()), torch.randn(5, 12)
    want = inner(x)
    for module in (inner, nn.Sequential(inner)):
        torch.testing.assert_close(tracer(module, x)(x), want)
    torch.testing.assert_close(inner(x), want)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 8)

    def forward(self, x: Any, labels: Any) -> Any:
        y = ct.linear_gelu(x, self.layer.weight, self.layer.bias)
        parts = ct.softmax(y, 0, torch.float64), ct.log_softmax(y, dim=-1), ct.logsumexp(y, 1), ct.linear_softmax(y, y)
        return *parts, ct.linear_cross_entropy(x, self.layer.weight, labels, label_smoothing=0.1)


def test_torch_fx_traces_functions() -> None:
    module, x, labels = Functions(), torch.randn(5, 12), torch.randint(8, (5,))
    traced = torch.fx.symbolic_trace(module)
    for found, expected in zip(traced(x, labels), module(x, labels), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match=r"input: expected a torch\.Tensor, got list"):
        ct.softmax([1.0], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["aot_eager", operators])
def test_compiled_and_fused_around_fused_modules(backend: Any) -> None:
    inner, x = ct.fuse(Head()), torch.randn(5, 12)
    want = inner(x)
    torch.testing.assert_close(torch.compile(inner, backend=backend)(x), want)
    outer = nn.Sequential(inner, nn.Tanh())
    torch.testing.assert_close(torch.compile(outer, backend=backend, fullgraph=True)(x), want.tanh())
    fused = ct.fuse(outer)
    torch.testing.assert_close(fused(x), want.tanh())
    assert fused_chains(fused) == [("linear", "gelu", "mul", "softmax", "tanh")]


def test_transforms_of_fused_modules() -> None:
    module, x = Head(), torch.randn(5, 12)
    fused = ct.fuse(module)
    fused(x)
    doubled = {name: p * 2 for name, p in module.named_parameters()}

    def called(m: Any) -> Any:
        return lambda p, x: torch.func.functional_call(m, p, (x,)).sin().sum()

    for transform in (
        lambda m: torch.func.functional_call(m, doubled, (x,)),
        lambda m: torch.vmap(m)(x),
        lambda m: torch.func.jvp(m, (x,), (torch.ones_like(x),)),
        lambda m: torch.func.grad(called(m))(doubled, x),
        lambda m: torch.vmap(torch.func.grad(called(m)), in_dims=(None, 0))(doubled, x),
        lambda m: torch.func.jacrev(m)(x),
        lambda m: torch.autograd.functional.hessian(lambda z: m(z).sin().sum(), x[0]),
    ):
        torch.testing.assert_close(transform(fused), transform(module))


def test_calls_from_several_threads() -> None:
    module, wrong = Head(), []
    fused = ct.fuse(module)

    def call(rows: int) -> None:
        for k in range(3):
            x = torch.randn(rows + k, 12)
            if not torch.allclose(fused(x), module(x), atol=1e-5):
                wrong.append(rows + k)

    threads = [threading.Thread(target=call, args=(3 * k + 2,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_forward_is_called_directly() -> None:
    module, x = Head(), torch.randn(5, 12)
    fused = ct.fuse(module)
    torch.testing.assert_close(fused.forward(x, scale=2.0), module(x, scale=2.0))
    assert not fused_chains(fused)


def test_hooks_before_and_after_the_first_call() -> None:
    fused, x, seen = ct.fuse(Head()), torch.randn(5, 12, requires_grad=True), []
    fused.linear.register_forward_pre_hook(lambda *a: seen.append("before"))
    fused.register_full_backward_hook(lambda *a: seen.append("backward"))
    fused(x).sum().backward()
    assert seen == ["before", "backward"]
    fused.linear.register_forward_hook(lambda *a: seen.append("after"))
    fused.linear.register_full_backward_hook(lambda *a: seen.append("backward of the layer"))
    fused(x).sum().backward()
    assert seen[2:] == ["before", "after", "backward of the layer", "backward"]


def test_drop_in_modules_read_their_parameters_as_attributes() -> None:
    """Subclasses and classes put in place of one, as sharding does, may say what `weight` is."""
    x = torch.randn(5, 12)

    class Tripled(ct.LinearGELU):
        weight = property(lambda self: self._parameters["weight"] * 3)  # type: ignore[assignment]

    class Squashed(ct.LinearGELU):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            return found.tanh() if name == "weight" else found

    for cls in (Tripled, Squashed):
        module = ct.LinearGELU(12, 8)
        module.__class__ = cls
        torch.testing.assert_close(module(x), F.gelu(F.linear(x, module.weight, module.bias)))


@pytest.mark.parametrize("head", [ct.HeadSum, ct.HeadLogSumExp, ct.HeadSoftmax])
def test_drop_in_modules_call_what_stands_for_a_forward_of_pytorch_s(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do for all modules of a class, to count or to quantise."""
    module, x, called = head(4, 5).eval(), torch.randn(3, 4), []
    expected = module(x)
    for kind in (nn.Linear, nn.BatchNorm1d):

        def forward(self: Any, x: Any, plain: Any = kind.forward) -> Any:
            called.append(type(self))
            return plain(self, x)

        monkeypatch.setattr(kind, "forward", forward)
    torch.testing.assert_close(module(x), expected)
    assert called == ([nn.Linear, nn.BatchNorm1d] if head is ct.HeadSoftmax else [nn.Linear])


def test_functions_compile_with_a_dimension_that_changes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, dim: ct.softmax(x, dim) + ct.logsumexp(x, dim, True), backend="eager", fullgraph=True
    )
    x = torch.randn(2, 3, 4)
    for dim in (0, 1, 2, -1):
        torch.testing.assert_close(compiled(x, dim), x.softmax(dim) + x.logsumexp(dim, True))


def test_drop_in_modules_compile_without_a_warning() -> None:
    module, x = ct.HeadLogSumExp(12, 8), torch.randn(5, 12)
    expected = module(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache.*")
        torch.testing.assert_close(torch.compile(module, backend="eager")(x), expected)
