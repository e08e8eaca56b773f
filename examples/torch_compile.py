"""torch.compile with cupyfuse as its backend: chains run fused, Inductor compiles the rest.

The model is compiled once for all batch sizes, without a graph break, and differentiates as before.

    python examples/torch_compile.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler

import cupyfuse.torch.backend


class Model(nn.Module):
    """An energy and class probabilities of each row; the convolution is left to Inductor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 32, 256)
        self.logits = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.stem(x)).flatten(1)
        logits = self.logits(nn.functional.gelu(self.hidden(x)))
        return -torch.logsumexp(logits, dim=1), torch.softmax(logits, dim=1)


def choose_backend() -> Any:
    """Return the name "cupyfuse", or a backend function if cupyfuse is not installed or Inductor has no compiler."""
    try:
        get_cpp_compiler()
    except Exception as missing:
        print(f"Inductor has no C++ compiler here: only chains are compiled ({type(missing).__name__})")
        return fuse_chains_alone
    if "cupyfuse" in torch.compiler.list_backends():
        return "cupyfuse"
    print("cupyfuse is not installed: its backend is passed as a function")
    return cupyfuse.torch.backend.backend


def fuse_chains_alone(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A custom backend: fuse the chains of a graph, compile nothing else."""
    cupyfuse.torch.backend.fuse_graph(module.graph, only_gains=False)  # this model is too small to gain
    module.recompile()
    return module.forward


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain = Model().to(device)
    model = copy.deepcopy(plain)
    exact = copy.deepcopy(plain).double()

    # By default the backend fuses only chains that gain; those of so small a model do not.
    backend = choose_backend()
    options = None if backend is fuse_chains_alone else {"cupyfuse.only_gains": False}
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True, options=options)

    for batch in (16, 33, 100):
        x = torch.randn(batch, 4, 32, device=device)
        found = []
        for called, module, given in ((plain, plain, x), (compiled, model, x), (exact, exact, x.double())):
            found.append(results_and_gradients(called, module, given))
        check(batch, *found)

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{graphs} graph compiled for three batch sizes")
    if graphs != 1:
        raise SystemExit("the model was compiled again for another batch size")

    # In the graph that Inductor gets, chains are calls of cupyfuse's operator.
    explained = torch.compile(model, backend=show_graph, fullgraph=True, dynamic=True)
    with torch.no_grad():
        explained(x)


def show_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A custom backend: fuse the chains of a graph and print its calls; exit if none is cupyfuse's."""
    forward = fuse_chains_alone(module, inputs)
    calls = [node for node in module.graph.nodes if node.op == "call_function" or node.op == "call_method"]
    print("the graph without gradients:", " -> ".join(str(getattr(n.target, "__name__", n.target)) for n in calls))
    if not any(node.target is torch.ops.cupyfuse.chain.default for node in calls):
        raise SystemExit("no part of the model runs through cupyfuse")
    return forward


def results_and_gradients(called: Callable[..., Any], module: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    """Call a module, as it is or compiled; return its results and the gradients of its parameters."""
    energy, probabilities = called(x)
    (energy.mean() + probabilities.square().sum()).backward()
    gradients = [p.grad for p in module.parameters()]
    module.zero_grad()
    return [energy.detach(), probabilities.detach(), *gradients]


def check(batch: int, plain: list[Any], compiled: list[Any], exact: list[Any]) -> None:
    """Exit if the compiled model's results or gradients are less accurate than the plain model's.

    Sums in another order may cost 16 roundings of the largest element: a gradient passes four sums on its way to the
    first layer.
    """
    worst = 0.0
    for a, b, right in zip(plain, compiled, exact, strict=True):
        size = float(right.abs().max())
        errors = [float((value.double() - right).abs().max()) / size for value in (a, b)]
        worst = max(worst, errors[1])
        if not errors[1] <= errors[0] + 16 * 2.0**-24:
            raise SystemExit(f"batch of {batch}: error {errors[1]:.2g} compiled, {errors[0]:.2g} as it is")
    print(f"batch of {batch}: results and gradients within {worst:.2g} of float64, relative to the largest element")


if __name__ == "__main__":
    main()
