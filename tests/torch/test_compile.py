"""Chains in compiled graphs: the backend, the pass, and the registered operators."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch_models as models
from support import ROOT
from torch import nn
from torch.nn import functional as F
from torch_support import Graphs, close, pair

import cupyfuse.torch as ct
from cupyfuse.torch.backend import backend, fuse_graph
from cupyfuse.torch.chains import custom_op
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.chains.custom_op import options_text
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.rules.symbols import Ref

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def everything(y: Any) -> list[Any]:
    return list(y.values()) if isinstance(y, dict) else [y]


def step(module: Any, x: Any) -> list[Any]:
    module.zero_grad()
    outputs = everything(module(x))
    sum(y.sin().sum() for y in outputs).backward()
    return [y.detach() for y in outputs] + [p.grad for p in module.parameters()]


@pytest.mark.rotates
@pytest.mark.parametrize("model", [*models.HEADS, models.Products, models.InPlace])
def test_the_backend(model: type[nn.Module], device: str) -> None:
    plain, _, _ = pair(model(), device)
    compiled = torch.compile(copy.deepcopy(plain), backend=backend, fullgraph=True)
    for rows in (5, 8):
        x = torch.randn(rows, 12, device=device)
        close(step(compiled, x), step(plain, x))
    for a, b in zip(compiled.buffers(), plain.buffers(), strict=True):
        close(a, b)


@pytest.mark.parametrize("model", [*models.HEADS, models.Products, models.InPlace])
def test_heads_are_one_chain_in_the_graph(model: type[nn.Module]) -> None:
    graphs = Graphs()
    plain = model()
    compiled = torch.compile(copy.deepcopy(plain), backend=graphs, fullgraph=True)
    x = torch.randn(6, 12)
    close(step(compiled, x), step(plain, x))
    (chain,) = graphs.chains()
    assert len(chain) >= 4


# What runs between the operations of a chain ------------------------------------------------------------------------


def _overwritten(x: Any) -> Any:
    y = x * 2
    x.zero_()
    return y.exp()


def _overwritten_beneath(x: Any) -> Any:
    row = x[0]
    y = row * 2
    x.zero_()
    return y.exp()


def _parts_overwritten(x: Any) -> Any:
    h = F.gelu(x)
    h.add_(1)
    y = h * 2
    h[0] = 0
    return y.exp()


def _overwritten_between(x: Any) -> Any:
    h = torch.softmax(x, -1)
    y = h.cumsum(0)
    x.zero_()
    return y, (h * 2).exp()


def _overwritten_later(x: Any) -> Any:
    h = x.cumsum(0)
    y = torch.softmax(h, -1)
    h[0] = 0
    return y


def _overwritten_and_returned(x: Any) -> Any:
    h = F.gelu(x * 2)
    h += 1
    y = torch.softmax(h, -1)
    h[0] = 0
    return y, h


def _without_gradients(x: Any) -> Any:
    with torch.no_grad():
        target = torch.softmax(x * 2, -1)
    return target * torch.log_softmax(x, -1)


def _with_gradients_within(x: Any) -> Any:
    with torch.no_grad():
        t = torch.softmax(x * 2, -1)
        with torch.enable_grad():
            u = torch.softmax(x * 3, -1)
    return (t * torch.log_softmax(x, -1) + u).exp()


def _shifted(x: Any) -> Any:
    with torch.no_grad():
        top = (x * 1.5).amax(-1, keepdim=True)
    return (x - top).exp().sum(-1).log()


def _autocast_between(x: Any) -> Any:
    h = torch.softmax(x * 2, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.linear(h, torch.ones(5, 5))
    return z.float(), z.dtype is torch.bfloat16, torch.logsumexp(h * 2, -1)


def _two_draws(x: Any) -> Any:
    h = torch.softmax(x * 2, -1)
    return F.dropout(h, 0.5), F.dropout(x, 0.5), (h * 2).logsumexp(-1)


def _transposed(x: Any) -> Any:
    return torch.softmax(x * 2, -1).t()


def _transposed_before(x: Any) -> Any:
    y = F.gelu(x.t()) * 2
    return y, y.t().view(-1)


def _by_its_size(x: Any) -> Any:
    h = torch.softmax(x * 2, -1)
    return (torch.log_softmax(x, -1) / h.shape[0]).reshape(h.shape[0] * 5) + h.size(1)


BETWEEN = [
    _overwritten, _overwritten_beneath, _parts_overwritten, _overwritten_between, _overwritten_later,
    _overwritten_and_returned, _without_gradients, _with_gradients_within, _shifted, _autocast_between, _two_draws,
    _transposed, _transposed_before, _by_its_size,
]  # fmt: skip


@pytest.mark.rotates
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("function", BETWEEN)
def test_a_chain_stays_where_it_is(function: Any, graded: bool, dynamic: bool) -> None:
    """Values, layouts and gradients are eager's, whatever is written, drawn or switched between its operations."""
    given = torch.randn(4, 5)
    seen = []
    for run in (function, torch.compile(function, backend=Graphs(), fullgraph=True, dynamic=dynamic)):
        torch.manual_seed(3)
        leaf = given.clone().requires_grad_(graded)
        x = leaf * 1 if graded else leaf.clone()
        results = run(x)
        results = results if isinstance(results, tuple) else (results,)
        tensors = [y for y in results if isinstance(y, torch.Tensor)]
        if graded:
            sum((y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum() for y in tensors).backward()
        seen.append(([y.detach() for y in tensors], [y.stride() for y in tensors], [y.requires_grad for y in tensors],
                     [y for y in results if not isinstance(y, torch.Tensor)], x.detach(), leaf.grad))  # fmt: skip
    torch.testing.assert_close(*(each[0] for each in seen), rtol=1e-5, atol=1e-6)
    assert seen[0][1:4] == seen[1][1:4]
    torch.testing.assert_close(*(each[4] for each in seen))
    if graded:
        torch.testing.assert_close(*(each[5] for each in seen), rtol=1e-4, atol=1e-4)


def test_a_buffer_is_read_before_it_is_updated() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.ones(5))

        def forward(self, x: Any) -> Any:
            y = x - self.centre
            self.centre.mul_(0.9).add_(x.mean(0) * 0.1)
            return torch.softmax(y, -1)

    plain = Centred()
    compiled = torch.compile(copy.deepcopy(plain), backend=Graphs(), fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 5)
        close(compiled(x), plain(x))
    close(compiled.centre, plain.centre)


def test_only_what_the_backward_pass_reads_is_kept(device: str) -> None:
    graphs = Graphs()
    x, w = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(7, 8, device=device)
    compiled = torch.compile(lambda x, w: torch.softmax(x @ w.t(), -1), backend=graphs)
    compiled(x, w)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = compiled(x, w)
    assert len(graphs.chains()) == 1
    assert all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in kept)
    y[:, 0].sum().backward()
    expected = torch.autograd.grad(torch.softmax(x @ w.t(), -1)[:, 0].sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_network_keeps_the_rest() -> None:
    graphs = Graphs()
    plain = models.Network()
    compiled = torch.compile(copy.deepcopy(plain), backend=graphs, fullgraph=True)
    x = torch.randn(3, 2, 6)
    close(step(compiled, x), step(plain, x))
    assert "conv1d" in str(graphs.seen[0].graph) and graphs.chains()


def test_the_number_of_rows_is_free() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    graphs = Graphs()

    def both(module: Any, inputs: Any) -> Any:
        counter(module, inputs)
        return graphs(module, inputs)

    compiled = torch.compile(models.HeadLogSumExp(), backend=both, dynamic=True)
    with torch.no_grad():
        for rows in (5, 6, 9, 30, 2):
            compiled(torch.randn(rows, 12))
    assert counter.frame_count == 1 and len(graphs.chains()) == 1


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda y, t, **k: F.nll_loss(y.log_softmax(1), t, **k)])
def test_losses_of_each_row_in_any_number(loss: Any) -> None:
    """Beneath autograd PyTorch takes them for a scalar where the number of rows is a symbol."""

    def function(x: Any, weight: Any, labels: Any) -> Any:
        return loss(x @ weight, labels, reduction="none")

    def aot(module: Any, inputs: Any) -> Any:
        fuse_graph(module.graph)
        module.recompile()
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(function, backend=aot, fullgraph=True)
    for rows in (5, 6, 9):
        x, weight = torch.randn(rows, 4), torch.randn(4, 7, requires_grad=True)
        labels, cotangent = torch.randint(7, (rows,)), torch.randn(rows)
        results = [run(x, weight, labels) for run in (compiled, function)]
        close(*results)
        close(*(torch.autograd.grad(y, weight, cotangent)[0] for y in results))


def test_without_gradients_nothing_is_saved() -> None:
    graphs = Graphs()
    compiled = torch.compile(models.HeadLogSumExp(), backend=graphs)
    with torch.no_grad():
        compiled(torch.randn(5, 12))
    compiled(torch.randn(5, 12))
    saved = [n.args[3] for m in graphs.seen for n in m.graph.nodes if n.target is torch.ops.cupyfuse.chain.default]
    assert saved[0] == "[]" and saved[1] != "[]"


def test_as_a_pass_of_the_inductor() -> None:
    from torch._inductor import config

    seen = []

    def custom(graph: torch.fx.Graph) -> None:
        fuse_graph(graph)
        seen.append(sum(n.target is torch.ops.cupyfuse.chain.default for n in graph.nodes))

    plain = models.HeadLogSumExp()
    x = torch.randn(5, 12)
    with config.patch(pre_grad_custom_pass=custom):
        close(step(torch.compile(copy.deepcopy(plain)), x), step(plain, x))
    assert seen == [1]


@pytest.mark.parametrize("way", ["option", "configuration", "pass", "neither"])
def test_inductors_calls_from_cpp_are_left_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would crash the process."""
    from torch._inductor import compile_fx, config

    seen = []

    def compiled(module: torch.fx.GraphModule, inputs: Any, config_patches: Any = None) -> Any:
        if way == "pass":
            fuse_graph(module.graph)
        seen.append(sum(n.target is torch.ops.cupyfuse.chain.default for n in module.graph.nodes))
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    plain, x = models.HeadLogSumExp(), torch.randn(5, 12)
    options = {"cpp_wrapper": True} if way == "option" else {}
    run = torch.compile(
        copy.deepcopy(plain), backend="cupyfuse" if way != "pass" else compiled, options=options or None
    )
    with config.patch(cpp_wrapper=way in ("configuration", "pass")), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(step(run, x), step(plain, x))
    told = [w for w in caught if "cpp_wrapper cannot call operators" in str(w.message)]
    assert (seen, len(told)) == (([1], 0) if way == "neither" else ([0], 1))


@pytest.mark.rotates
@pytest.mark.parametrize("first", ["torch._dynamo", "cupyfuse.torch"])
def test_the_backend_is_found_by_its_name(first: str) -> None:
    """Without installed entry points, whichever is imported first; and Dynamo is not imported for it."""
    code = f"""
import sys, importlib
import torch
importlib.import_module({first!r})
import cupyfuse.torch
assert ("torch._dynamo" in sys.modules) is ({first!r} == "torch._dynamo")
import torch._dynamo.backends.registry as registry
registry._discover_entrypoint_backends = lambda: None
assert registry.lookup_backend("cupyfuse").__module__ == "cupyfuse.torch.registration"
assert "cupyfuse" in torch._dynamo.list_backends()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "setup.cfg").read_text()
    assert "cupyfuse = cupyfuse.torch.backend:backend" in text


def test_fused_modules_can_be_compiled(device: str) -> None:
    plain, fused, x = pair(models.HeadSoftmax(), device)
    close(step(torch.compile(fused, backend=Graphs(), fullgraph=True), x), step(plain, x))


# Operators ----------------------------------------------------------------------------------------------------------

OPTIONS = options_text(Options())
CHAINS = {
    "logsumexp": Chain(
        ("x", "w", "b"),
        (Call("linear", (Ref(0), Ref(1), Ref(2)), (3,)), Call("logsumexp", (Ref(3), -1, True), (4,))),
        (4,),
    ),
    "two outputs": Chain(
        ("x", "w"),
        (Call("linear", (Ref(0), Ref(1), None), (2,)), Call("gelu", (Ref(2), "none"), (3,))),
        (3, 2),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("gradients", [False, True])
def test_operators_keep_pytorchs_rules(name: str, gradients: bool, device: str) -> None:
    chain = CHAINS[name]
    shapes = [(5, 12), (7, 12), (7,)][: len(chain.names)]
    tensors = [torch.randn(s, device=device, requires_grad=gradients) for s in shapes]
    saved = custom_op.describe_saved(chain, tensors, [gradients] * len(tensors)) if gradients else "[]"
    torch.library.opcheck(torch.ops.cupyfuse.chain.default, (tensors, [], chain.to_json(), saved, OPTIONS))
    if gradients:
        outputs = torch.ops.cupyfuse.chain(tensors, [], chain.to_json(), saved, OPTIONS)
        kept = [t.detach() for t in outputs[len(chain.outputs) :]]
        given = [torch.randn_like(t) for t in outputs[: len(chain.outputs)]]
        torch.library.opcheck(
            torch.ops.cupyfuse.chain_backward.default,
            ([t.detach() for t in tensors], kept, given, [], chain.to_json(), saved, [True] * len(tensors), OPTIONS),
        )


def test_second_derivatives_of_the_operator_are_refused() -> None:
    chain = CHAINS["logsumexp"]
    tensors = [torch.randn(s, requires_grad=True) for s in ((5, 12), (7, 12), (7,))]
    saved = custom_op.describe_saved(chain, tensors, [True] * 3)
    (y,) = torch.ops.cupyfuse.chain(tensors, [], chain.to_json(), saved, OPTIONS)[:1]
    (gradient,) = torch.autograd.grad(y.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.square().sum().backward()


def test_a_first_call_within_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    plain = nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.LayerNorm(8), nn.Softmax(-1))
    compiled = torch.compile(copy.deepcopy(plain), backend="cupyfuse", options={"cupyfuse.only_gains": False})
    for rows in (5, 6):
        x = torch.randn(rows, 12, requires_grad=True)
        results = [checkpoint(module, x, use_reentrant=False) for module in (plain, compiled)]
        grads = [torch.autograd.grad((r * r).sum(), x)[0] for r in results]
        torch.testing.assert_close(*grads)


def test_a_chain_is_text_and_back() -> None:
    chain = Chain(
        ("x",),
        (
            Call("clamp", (Ref(0), -1.5, float("inf")), (1,)),
            Call("sum", (Ref(1), (0, 1), True, None), (2,)),
        ),
        (2, 1),
        ((0, 1),),
    )
    again = Chain.from_json(chain.to_json())
    assert (again.names, again.calls, again.outputs, again.updates) == (
        chain.names,
        chain.calls,
        chain.outputs,
        chain.updates,
    )


# Modules and functions ----------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "logsumexp": (lambda x, d: ct.logsumexp(x, d), lambda x, d: torch.logsumexp(x, d)),
    "logsumexp, kept": (
        lambda x, d: ct.logsumexp(x, d, keepdim=True),
        lambda x, d: torch.logsumexp(x, d, keepdim=True),
    ),
    "softmax": (lambda x, d: ct.softmax(x, d), lambda x, d: torch.softmax(x, d)),
    "softmax in float64": (
        lambda x, d: ct.softmax(x, d, dtype=torch.float64).float(),
        lambda x, d: torch.softmax(x, d, dtype=torch.float64).float(),
    ),
    "log_softmax": (lambda x, d: ct.log_softmax(x, dim=d), lambda x, d: torch.log_softmax(x, dim=d)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 4, 5), (2, 3, 4, 5), (0, 3), (2, 0, 3)], ids=str)
def test_functions_of_any_rank(name: str, shape: tuple[int, ...], device: str) -> None:
    fused, plain = FUNCTIONS[name]
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        results = []
        for function in (fused, plain):
            x = torch.linspace(-2, 3, max(torch.Size(shape).numel(), 1), device=device)[: torch.Size(shape).numel()]
            x = x.view(shape).requires_grad_()
            y = function(x, dim)
            y.sin().sum().backward()
            results.append((y.detach(), x.grad))
        close(*results)


@pytest.mark.parametrize("bias", [True, False])
def test_functions_with_a_linear_layer(bias: bool, device: str) -> None:
    x, w = torch.randn(2, 3, 12, device=device), torch.randn(7, 12, device=device)
    b = torch.randn(7, device=device) if bias else None
    y = F.linear(x, w, b)
    close(ct.linear_logsumexp(x, w, b), y.logsumexp(-1))
    close(ct.linear_logsumexp(x, w, b, keepdim=True), y.logsumexp(-1, keepdim=True))
    close(ct.linear_softmax(x, w, b), y.softmax(-1))
    close(ct.linear_log_softmax(x, w, b), y.log_softmax(-1))
    close(ct.linear_gelu(x, w, b), F.gelu(y))
    close(ct.linear_gelu(x, w, b, approximate="tanh"), F.gelu(y, approximate="tanh"))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ct.softmax([1.0], 0), TypeError, "input: expected a torch.Tensor, got list"),
        (lambda: ct.logsumexp(torch.ones(2, 3), 2), IndexError, "dim"),
        (lambda: ct.linear_softmax(torch.ones(2, 3), None), TypeError, "weight: expected a torch.Tensor"),
        (lambda: ct.linear_gelu(torch.ones(2, 3), torch.ones(4, 3), approximate="fast"), ValueError, "approximate"),
        (lambda: ct.linear_softmax(torch.ones(2, 3), torch.ones(4, 5)), RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_functions_in_a_compiled_graph() -> None:
    function = torch.compile(lambda x, w: ct.linear_gelu(ct.softmax(x, 1), w), backend=Graphs(), fullgraph=True)
    x, w = torch.randn(5, 12), torch.randn(7, 12)
    close(function(x, w), F.gelu(F.linear(x.softmax(1), w)))


@pytest.mark.parametrize("name", ["HeadLogSumExp", "HeadSum", "HeadSoftmax"])
def test_drop_in_heads(name: str, device: str) -> None:
    torch.manual_seed(3)
    plain = getattr(models, name)(12, 7).to(device)
    torch.manual_seed(3)
    module = getattr(ct, name)(12, 7).to(device)
    state = {k.replace("linear.", "linear."): v for k, v in plain.state_dict().items()}
    assert sorted(module.state_dict()) == sorted(state)
    for key, value in module.state_dict().items():
        assert torch.equal(value, state[key])
    x = torch.randn(5, 12, device=device)
    close(step(module, x), step(plain, x))
    assert type(copy.deepcopy(module)) is type(module) and len(ct.explain(module).fused) == 1


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("LinearLogSumExp", lambda y: y.logsumexp(-1)),
        ("LinearSoftmax", lambda y: y.softmax(-1)),
        ("LinearLogSoftmax", lambda y: y.log_softmax(-1)),
        ("LinearGELU", F.gelu),
        ("LinearSiLU", F.silu),
        ("LinearReLU", F.relu),
    ],
)
def test_drop_in_layers(name: str, tail: Any, device: str) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(12, 7, bias=False).to(device)
    torch.manual_seed(3)
    layer = getattr(ct, name)(12, 7, bias=False).to(device)
    assert isinstance(layer, nn.Linear) and torch.equal(layer.weight, linear.weight)
    for shape in [(5, 12), (2, 3, 12), (12,)]:
        x = torch.randn(shape, device=device)
        close(layer(x), tail(linear(x)))
    assert ct.explain(layer).fused


def test_drop_in_reductions(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device)
    close(ct.Softmax(dim=-1)(x), x.softmax(-1))
    close(ct.LogSoftmax(dim=-1)(x), x.log_softmax(-1))


class _DeadEnds(torch.nn.Module):
    """Parameters that no gradient reaches, beside one that has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)
        self.weight, self.bound = torch.nn.Parameter(torch.rand(3)), torch.nn.Parameter(torch.rand(3))
        self.step = torch.nn.Parameter(torch.rand(3))

    def forward(self, x: Any, labels: Any) -> Any:
        z = self.linear(x)
        self.unused(z).softmax(-1)
        z = torch.where(z > self.bound, z, 0.5 * z) + torch.floor(self.step)
        return torch.nn.functional.cross_entropy(z, labels, weight=self.weight.detach())


@pytest.mark.parametrize("name", ["cupyfuse", "fuse"])
def test_parameters_that_no_gradient_reaches_keep_none(name: str) -> None:
    """Zeros would let optimizers decay them. Where PyTorch has zeros, as below a floor, they are zeros."""
    x, labels = torch.randn(5, 4), torch.randint(0, 3, (5,))
    grads = []
    for used in ("plain", name):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = _DeadEnds()
        run = model
        if used == "fuse":
            run = ct.fuse(model, only_gains=False)
        elif used != "plain":
            run = torch.compile(model, backend="cupyfuse", options={"cupyfuse.only_gains": False})
        run(x, labels).backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    plain, ours = grads
    assert {k for k, g in plain.items() if g is None} == {"unused.weight", "unused.bias", "weight", "bound"}
    for key, expected in plain.items():
        assert (ours[key] is None) == (expected is None), key
        if expected is not None:
            torch.testing.assert_close(ours[key], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "hihg"}, "precision"),
        ({"max_workspace": -1}, "max_workspace"),
        ({"only_gains": "no"}, "only_gains"),
        ({"max_prepared": "a"}, "max_prepared"),
        ({"graphs": True}, "there is no 'cupyfuse.graphs'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Softmax(-1))
    named = {f"cupyfuse.{k}": v for k, v in options.items()}
    with pytest.raises(Exception, match=message):
        torch.compile(model, backend="cupyfuse", options=named)(torch.randn(3, 6))


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x, w: torch.lerp(y, x, w),
        lambda y, x, w: torch.addcmul(w, y, x),
        lambda y, x, w: torch.addcdiv(y, x, w + 1),
    ],
    ids=["lerp", "addcmul", "addcdiv"],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_operands_that_repeat_along_a_changing_batch(function: Any, every_chain: None) -> None:
    torch._dynamo.reset()
    linear, w = nn.Linear(6, 6), torch.rand(6)
    compiled = torch.compile(lambda x: function(linear(x), x, w).exp(), backend="cupyfuse")
    for rows in (4, 5, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), function(linear(x), x, w).exp())


def test_a_changed_default_dtype_is_seen(fresh_dynamo, device):
    """Quotients of integers are of PyTorch's default dtype, also of a chain that was captured with another one."""
    x = torch.randint(-3, 4, (5, 8), device=device)
    weight = torch.rand(8, dtype=torch.float32, device=device, requires_grad=True)

    def function(x, weight):
        return torch.logsumexp(torch.softmax(x / 3, 1) * weight, 1)

    compiled, before = torch.compile(function, backend="cupyfuse"), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found, expected = compiled(x, weight), function(x, weight)
            assert found.dtype == expected.dtype == dtype
            torch.testing.assert_close(found, expected)
            gradients = [torch.autograd.grad(y.sum(), weight)[0] for y in (found, expected)]
            torch.testing.assert_close(*gradients)
    finally:
        torch.set_default_dtype(before)
