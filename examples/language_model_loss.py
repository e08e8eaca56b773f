"""The loss of a language model without its logits: one call, the same losses, memory that does not grow as they would.

A small model predicts a token from the two before it. It is trained three times from the same seed: with PyTorch's
linear layer and cross entropy, with `linear_cross_entropy`, which holds a block of rows of the logits at a time, and in
float64, which shows how far rounding alone moves float32 losses. Then a table, and with `--plot` a plot by matplotlib,
of memory over the vocabulary.

    python examples/language_model_loss.py [--steps N] [--plot FILE]
"""

from __future__ import annotations

import argparse
import copy
import tracemalloc

import torch
from common import compare_losses, draw_memory
from torch import nn
from torch.nn import functional as F

import cupyfuse.torch

VOCABULARY, FEATURES, TOKENS = 500, 24, 256
WORKSPACE = 100_000  # bytes: a fifth of the logits


class LanguageModel(nn.Module):
    """From two tokens to the loss of the third; `workspace` bounds the logits, or None has PyTorch compute them."""

    def __init__(self, workspace: int | None):
        super().__init__()
        self.workspace = workspace
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.hidden = nn.Linear(2 * FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        contexts, labels = tokens.unfold(0, 3, 1)[:, :2], tokens[2:]
        features = F.gelu(self.hidden(self.embedding(contexts).flatten(1)))
        if self.workspace is None:
            return F.cross_entropy(self.head(features), labels)
        return cupyfuse.torch.linear_cross_entropy(features, self.head.weight, labels, max_workspace=self.workspace)


def draw_texts(device: str, batches: int = 16) -> list[torch.Tensor]:
    """Draw texts: each token is one of three that may follow the one before it."""
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=generator)
    found = []
    for _ in range(batches):
        text = [0]
        for choice in torch.randint(3, (TOKENS - 1,), generator=generator).tolist():
            text.append(int(following[text[-1], choice]))
        found.append(torch.tensor(text, device=device))
    return found


def train(model: nn.Module, data: list[torch.Tensor], steps: int) -> list[float]:
    """Train; return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(data[step % len(data)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def peak_memory(classes: int, device: str, fused: bool) -> float:
    """Measure the peak memory of a step beside its operands, in MB, for 4096 tokens."""
    x = torch.randn(4096, FEATURES, device=device, requires_grad=True)
    weight = torch.randn(classes, FEATURES, device=device, requires_grad=True)
    labels = torch.randint(classes, (4096,), device=device)

    def step() -> None:
        if fused:
            loss = cupyfuse.torch.linear_cross_entropy(x, weight, labels, max_workspace=16 << 20)
        else:
            loss = F.cross_entropy(F.linear(x, weight), labels)
        loss.backward()

    if device == "cpu" and not fused:
        # PyTorch counts no memory on a CPU: the logits, their logarithms and the gradient of both live together.
        return 3 * 4 * 4096 * classes / 1e6
    step()  # plans the loss, and compiles its kernels
    x.grad = weight.grad = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    tracemalloc.start()
    step()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def print_memory(device: str, plot: str) -> None:
    """Print the memory of a step over the vocabulary, and draw it to the file `plot` if one is given."""
    numbers = [1000, 2000, 4000, 8000] if device == "cpu" else [1000 * 2**k for k in range(8)]
    print(f"\n{'vocabulary':>10} {'logits':>10} {'without':>10}")
    rows = []
    for classes in numbers:
        rows.append((peak_memory(classes, device, fused=False), peak_memory(classes, device, fused=True)))
        print(f"{classes:>10} {rows[-1][0]:>7.0f} MB {rows[-1][1]:>7.0f} MB")
    if not rows[-1][1] < rows[-1][0] / 2:
        raise SystemExit("a step takes as much memory as the logits")
    if plot:
        draw_memory(plot, "vocabulary", numbers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", default="", metavar="FILE", help="where to draw memory over the vocabulary")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # on matrices as small as these, threads wait for each other

    torch.manual_seed(0)
    plain = LanguageModel(None).to(device)
    exact = copy.deepcopy(plain).double()
    fused = copy.deepcopy(plain)
    fused.workspace = WORKSPACE  # the one line

    data = draw_texts(device)
    exact_losses, plain_losses, fused_losses = (train(m, data, given.steps) for m in (exact, plain, fused))
    compare_losses(plain_losses, fused_losses, exact_losses)
    print_memory(device, given.plot)


if __name__ == "__main__":
    main()
