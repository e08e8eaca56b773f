"""A PyTorch model trained with and without cupyfuse: one line more, the same losses.

An encoder of linear layers and GELU, and a head of a linear layer, BatchNorm, a scale and log-softmax. It is trained
three times from the same seed on the same data: plain, fused, and in float64, which shows how far rounding alone moves
float32 losses.

    python examples/torch_model.py [--steps N]
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from common import compare_losses
from torch import nn
from torch.nn import functional as F

import cupyfuse.torch


@dataclass(frozen=True)
class Sizes:
    batch: int
    features: int
    hidden: int
    classes: int


# On a CPU chains run as NumPy code; sizes only keep the script short.
SMALL = Sizes(batch=64, features=32, hidden=64, classes=40)
LARGE = Sizes(batch=1024, features=2048, hidden=8192, classes=4096)
WARM_UP = 10  # untimed steps: tracing, planning, compiling kernels


class Classifier(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(sizes.features, sizes.hidden),
            nn.GELU(),
            nn.Linear(sizes.hidden, sizes.hidden),
            nn.GELU(),
        )
        self.logits = nn.Linear(sizes.hidden, sizes.classes)
        self.norm = nn.BatchNorm1d(sizes.classes)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.scale * self.norm(self.logits(self.encoder(x))), dim=1)


def draw_batches(sizes: Sizes, device: str, batches: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw batches of a learnable task: the class is the largest of some random linear functions of the input."""
    generator = torch.Generator(device).manual_seed(1)
    teacher = torch.randn(sizes.features, sizes.classes, device=device, generator=generator)
    found = []
    for _ in range(batches):
        x = torch.randn(sizes.batch, sizes.features, device=device, generator=generator)
        found.append((x, (x @ teacher).argmax(1)))
    return found


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], steps: int) -> tuple[list[float], float]:
    """Train; return the loss of every step, and milliseconds per step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dtype = next(model.parameters()).dtype
    losses, begun = [], 0.0
    for step in range(steps):
        if step == WARM_UP:
            synchronize()
            begun = time.perf_counter()
        x, labels = data[step % len(data)]
        loss = F.nll_loss(model(x.to(dtype)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    synchronize()
    took = (time.perf_counter() - begun) / (steps - WARM_UP)
    return torch.stack(losses).tolist(), took * 1e3


def synchronize() -> None:
    # Launches are asynchronous.
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = max(parser.parse_args().steps, WARM_UP + 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = LARGE if device == "cuda" else SMALL
    if device == "cpu":
        torch.set_num_threads(1)  # on matrices as small as these, threads wait for each other

    torch.manual_seed(0)
    plain = Classifier(sizes).to(device)
    exact = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    model = cupyfuse.torch.fuse(model)  # the one line

    data = draw_batches(sizes, device)
    exact_losses, _ = train(exact, data, steps)
    plain_losses, plain_time = train(plain, data, steps)
    fused_losses, fused_time = train(model, data, steps)

    print(model.explain())
    print()
    compare_losses(plain_losses, fused_losses, exact_losses)

    print(f"a step of training: {plain_time:.3g} ms plain, {fused_time:.3g} ms fused")
    if device == "cpu":
        print("On a CPU cupyfuse runs chains as NumPy code: the losses are the point here, not the time.")


if __name__ == "__main__":
    main()
