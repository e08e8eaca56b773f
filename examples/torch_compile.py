"""torch.compile with cupyfuse as its backend: chains run fused, the inductor compiles the rest of the graph.

The model is compiled once, for any batch size, without a graph break. Results and gradients are those of the model.

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
    """An energy of each row and class probabilities; the convolution is no chain, and is the inductor's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 32, 256)
        self.logits = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.stem(x)).flatten(1)
        logits = self.logits(nn.functional.gelu(self.hidden(x)))
        return -torch.logsumexp(logits, dim=1), torch.softmax(logits, dim=1)


def chosen_backend() -> Any:
    """What stands here for "cupyfuse", the name by which `torch.compile` finds the backend of an installed cupyfuse."""
    try:
        get_cpp_compiler()
    except Exception as missing:
        print(f"the inductor cannot work here, what is no chain runs as it is ({type(missing).__name__})")
        return chains_alone
    if "cupyfuse" in torch.compiler.list_backends():
        return "cupyfuse"
    print("cupyfuse is not installed: its backend has no name, and is given as a function")
    return cupyfuse.torch.backend.backend


def chains_alone(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of one's own: the chains of a graph are exchanged, nothing else is compiled."""
    cupyfuse.torch.backend.fuse_graph(module.graph, only_gains=False)  # small as they are here
    module.recompile()
    return module.forward


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain = Model().to(device)
    model = copy.deepcopy(plain)
    exact = copy.deepcopy(plain).double()

    # Left to itself, the backend takes the chains that gain by it; those of so small a model do not.
    backend = chosen_backend()
    options = None if backend is chains_alone else {"cupyfuse.only_gains": False}
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True, options=options)

    for batch in (16, 33, 100):
        x = torch.randn(batch, 4, 32, device=device)
        found = []
        for called, parameters, given in ((plain, plain, x), (compiled, model, x), (exact, exact, x.double())):
            energy, probabilities = called(given)
            (energy.mean() + probabilities.square().sum()).backward()
            gradients = [p.grad for p in parameters.parameters()]
            parameters.zero_grad()
            found.append([energy.detach(), probabilities.detach(), *gradients])
        check(batch, *found)

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{graphs} graph compiled for three batch sizes")
    if graphs != 1:
        raise SystemExit("the model was compiled anew for another batch size")

    # What was handed on to the inductor: the chains are operators of cupyfuse's there.
    explained = torch.compile(model, backend=show, fullgraph=True, dynamic=True)
    with torch.no_grad():
        explained(x)


def show(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    forward = chains_alone(module, inputs)
    calls = [node for node in module.graph.nodes if node.op == "call_function" or node.op == "call_method"]
    print("the graph without gradients:", " -> ".join(str(getattr(n.target, "__name__", n.target)) for n in calls))
    if not any(node.target is torch.ops.cupyfuse.chain.default for node in calls):
        raise SystemExit("no part of the model runs through cupyfuse")
    return forward


def check(batch: int, plain: list[Any], compiled: list[Any], exact: list[Any]) -> None:
    """Fail where the compiled model's results or gradients are further from float64 than the model's own.

    Sums are taken in another order, so that some roundings of the largest element are allowed beyond that: 16, since a
    gradient has passed through four sums by the time it reaches the first layer.
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
