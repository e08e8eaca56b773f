"""A fused module in a CUDA graph: replays see new inputs and changed weights.

Values computed from weights (here the column sums of the last layer) are computed within the graph, from the weights
at the time of the replay.

    python examples/torch_cuda_graph.py
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

import cupyfuse.torch


class Model(nn.Module):
    """A classifier's confidence, and the sum of its logits."""

    def __init__(self, features: int, hidden: int, classes: int):
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.logits = nn.Linear(hidden, classes)
        self.score = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.nn.functional.gelu(self.hidden(x))
        return torch.softmax(self.logits(x), dim=1).amax(dim=1), self.score(x).sum(dim=1)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = Model(512, 1024, 1000).to(device)
    model = cupyfuse.torch.fuse(plain)  # shares the parameters of `plain`
    inputs = torch.randn(128, 512, device=device)

    # Trace, plan and compile before the capture.
    with torch.no_grad():
        model(inputs)
    if device == "cpu":
        print("There is no GPU here, so no graph to capture. A call would be captured with this plan:\n")
        print(model.explain())
        return

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = model(inputs)

    for k in range(3):
        inputs.copy_(torch.randn(128, 512, device=device))
        graph.replay()
        check(f"new inputs, {k + 1}", outputs, plain, inputs)

    with torch.no_grad():
        plain.score.weight.mul_(0.5)
        plain.hidden.bias.add_(1.0)
    graph.replay()
    check("other weights", outputs, plain, inputs)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for k in range(3):
        sum(result.mean() for result in plain(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        graph.replay()
        check(f"after step {k + 1} of an optimizer", outputs, plain, inputs)

    with torch.no_grad():
        for name, call in (
            ("plain", lambda: plain(inputs)),
            ("fused", lambda: model(inputs)),
            ("fused, replayed", graph.replay),
        ):
            print(f"{name}: {microseconds_per_call(call):.0f} us a call")


def check(what: str, found: tuple[torch.Tensor, ...], plain: nn.Module, inputs: torch.Tensor) -> None:
    """Exit if a replay is less accurate than the plain module, beyond 8 roundings for the order of sums."""
    with torch.no_grad():
        wanted = copy.deepcopy(plain).double()(inputs.double())
        expected = plain(inputs)
    for ours, theirs, exact in zip(found, expected, wanted, strict=True):
        errors = [float((result.double() - exact).abs().max()) for result in (ours, theirs)]
        if not errors[0] <= errors[1] + 8 * 2.0**-24 * float(exact.abs().max()):
            raise SystemExit(f"{what}: error {errors[0]:.2g} of the replay, {errors[1]:.2g} of the plain module")
    print(f"{what}: the replay agrees with the plain module")


def microseconds_per_call(call, calls: int = 50) -> float:
    """Time many calls in a row; return microseconds per call."""
    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / calls * 1e6


if __name__ == "__main__":
    main()
