"""Random chains through fused modules and compiled graphs: nothing but the speed may differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from searched import EXAMPLES, searched
from torch import nn
from torch.nn import functional as F
from torch_steps import DOUBLE, Code, near, step
from torch_support import Graphs, close, pair

import cupyfuse.torch as ct

# In compiled graphs -------------------------------------------------------------------------------------------------


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=Graphs(), fullgraph=True)


@pytest.mark.parametrize("rows", [5, 0])
def test_numbers_chosen_in_a_graph(rows: int) -> None:
    x = torch.randn(rows, 12, requires_grad=True)
    code = lambda x: torch.where(x > 0, x, 0.0).exp().softmax(-1)  # noqa: E731
    close(compiled(code)(x), code(x))


def test_what_is_detached_in_a_graph() -> None:
    function = compiled(lambda x, b: ((x.exp() * 2).detach(), b.exp().softmax(0), (x * 2).softmax(-1)))
    outputs = function(torch.randn(5, 12, requires_grad=True), torch.randn(12))
    assert [y.requires_grad for y in outputs] == [False, False, True]


def test_results_of_a_graph_are_changed_in_place() -> None:
    def code(x: Any) -> Any:
        y = (x * 2).exp() + 0.5
        y[..., 0] = 0
        return y.sin().exp()

    x = torch.randn(2, 3, 6, requires_grad=True)
    close(compiled(code)(x), code(x))


def test_a_moving_average_in_a_graph() -> None:
    def code(m: Any, y: Any) -> Any:
        y = (y * 2).exp()
        m.average.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return (y * 2).softmax(-1)

    module = Code(code)
    module.register_buffer("average", torch.zeros(12))
    plain, _, x = pair(module, "cpu", DOUBLE)
    fused = compiled(copy.deepcopy(plain))
    for _ in range(3):
        near(step(fused, x), step(plain, x))
        assert not fused.average.requires_grad
    near(fused.average, plain.average)


# Random chains ------------------------------------------------------------------------------------------------------

WIDTH = 6


class Drawn(nn.Module):
    """Operations of `OPERATIONS`, each on earlier values."""

    def __init__(self, steps: list[tuple[str, int, int]]):
        super().__init__()
        self.linear, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.linear.weight
        self.w, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), nn.Parameter(torch.randn(1))
        self.prelu, self.act = nn.PReLU(), nn.SELU(inplace=True)
        self.norm, self.layer_norm = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.steps = steps

    def values(self, x: Any) -> list[Any]:
        values = [x, self.linear.bias, self.w, self.scale, self.shift]
        for name, first, second in self.steps:
            values.append(self.apply_one(name, values[first], values[second]))
        return values

    def apply_one(self, name: str, a: Any, b: Any) -> Any:
        return OPERATIONS[name](self, a, b)

    def forward(self, x: Any) -> Any:
        return self.values(x)[-1 : -1 - max(1, len(self.steps) // 3) : -1]


def _added(m: Any, a: Any, b: Any) -> Any:
    a = a * 2
    a += b
    return a


def _set(m: Any, a: Any, b: Any) -> Any:
    a = a + 0.5
    a[..., 0] = 0
    return a


OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda m, a, b: a + b,
    "sub": lambda m, a, b: torch.sub(a, b, alpha=0.5),
    "mul": lambda m, a, b: a * b,
    "div": lambda m, a, b: a / (b.abs() + 0.5),
    "maximum": lambda m, a, b: torch.maximum(a, b),
    "where": lambda m, a, b: torch.where(a > b, a, 0.5),
    "lerp": lambda m, a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda m, a, b: torch.addcmul(a, a, b, value=0.5),
    "mask": lambda m, a, b: a.masked_fill(~(b > 0), 0.1),
    "number": lambda m, a, b: 2 - a * 0.25,
    "power": lambda m, a, b: a.tanh() ** 2,
    "exp": lambda m, a, b: a.tanh().exp(),
    "log": lambda m, a, b: torch.log1p(a.abs()),
    "sin": lambda m, a, b: a.sin(),
    "clamp": lambda m, a, b: a.clamp(-0.75, 1.25),
    "gelu": lambda m, a, b: F.gelu(a),
    "silu": lambda m, a, b: F.silu(a),
    "softplus": lambda m, a, b: F.softplus(a),
    "prelu": lambda m, a, b: m.prelu(a),
    "selu": lambda m, a, b: m.act(a * 1),
    "linear": lambda m, a, b: m.linear(a),
    "tied": lambda m, a, b: m.tied(a),
    "matmul": lambda m, a, b: a @ m.w.T,
    "square": lambda m, a, b: a @ a.transpose(-1, -2),
    "sum": lambda m, a, b: a.sum(-1, keepdim=True),
    "mean": lambda m, a, b: a.mean(0),
    "all": lambda m, a, b: a.mean(),
    "logsumexp": lambda m, a, b: a.logsumexp(-1),
    "max": lambda m, a, b: a.max(-1, keepdim=True)[0],
    "amin": lambda m, a, b: a.amin(0, keepdim=True),
    "std": lambda m, a, b: (a * 1.5).std(-1, keepdim=True, correction=0),
    "norm": lambda m, a, b: a.norm(dim=-1),
    "softmax": lambda m, a, b: a.softmax(-1),
    "log_softmax": lambda m, a, b: a.log_softmax(0),
    "layer_norm": lambda m, a, b: m.layer_norm(a),
    "batch_norm": lambda m, a, b: m.norm(a),
    "transpose": lambda m, a, b: a.transpose(0, -1),
    "flatten": lambda m, a, b: a.flatten(),
    "rows": lambda m, a, b: a.reshape(-1, a.shape[-1]),
    "unsqueeze": lambda m, a, b: a.unsqueeze(1),
    "squeeze": lambda m, a, b: a.squeeze(),
    "expand": lambda m, a, b: a.expand(2, *a.shape),
    "last": lambda m, a, b: a[..., None],
    "half": lambda m, a, b: a.chunk(2, -1)[-1],
    "clone": lambda m, a, b: a.clone(),
    "detach": lambda m, a, b: a.detach(),
    "cat": lambda m, a, b: torch.cat([a, a.sin()], -1),
    "cumsum": lambda m, a, b: a.cumsum(-1),
    "in place": lambda m, a, b: a.clone().tanh_().mul_(2),
    "iadd": _added,
    "set": _set,
    "view": lambda m, a, b: (a * 2).view(-1).mul_(0.5),
}
SHAPES = [(4, 6)] * 4 + [(2, 3, 6), (6,), (1, 6), (2, 1, 6), (4, 1), (0, 6), (1, 3, 1, 6), ()]
NAMES = st.sampled_from(sorted(OPERATIONS))
STEPS = st.lists(st.tuples(NAMES, st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=8)


def _possible(drawn: list[tuple[str, int, int]], x: Any) -> list[tuple[str, int, int]]:
    """Those of the steps that PyTorch can take, most often on the latest value, with sizes that can be compared."""
    kept: list[tuple[str, int, int]] = []
    for name, first, second in drawn:
        count = 5 + len(kept)
        latest = count - 1 if kept else 0
        trial = [*kept, (name, first if first < count and kept else latest, second if second < count else latest)]
        try:
            torch.manual_seed(0)
            y = Drawn(trial).double().values(x)[-1]
        except (RuntimeError, ValueError, IndexError):
            continue
        if y.dtype == DOUBLE and y.numel() < 1000 and bool((y.isfinite() & (y.abs() < 1e3)).all()):
            kept = trial
    return kept


def _compared(drawn: list[tuple[str, int, int]], shape: tuple[int, ...], through: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=DOUBLE)
    steps = _possible(drawn, x)
    torch.manual_seed(0)
    plain = Drawn(steps).double()
    fused = through(copy.deepcopy(plain))
    for training, batch in ((True, x), (False, x), (True, torch.cat([x, x]) if shape else x)):
        plain.train(training), fused.train(training)
        try:
            wanted = step(plain, batch)
        except (RuntimeError, ValueError):  # not for so many rows
            return
        for k, (got, want) in enumerate(zip(step(fused, batch), wanted, strict=True)):
            got, want = (torch.zeros(()) if t is None else t for t in (got, want))
            if got.shape != want.shape and not got.any() and not want.any():
                continue  # a gradient of zero, and none
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")
        with torch.no_grad():
            near(fused(batch), plain(batch))
    near(list(fused.buffers()), list(plain.buffers()))


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(6))
def test_random_chains(part: int) -> None:
    @searched(part, EXAMPLES // 120, drawn=STEPS, shape=st.sampled_from(SHAPES))
    def check(drawn: Any, shape: Any) -> None:
        _compared(drawn, shape, ct.fuse)

    check()


@pytest.mark.rotates
def test_random_chains_in_graphs() -> None:
    @searched(9, EXAMPLES // 200, drawn=STEPS, shape=st.sampled_from(SHAPES))
    def check(drawn: Any, shape: Any) -> None:
        _compared(drawn, shape, compiled)

    check()
