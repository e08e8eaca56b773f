"""Linear -> logsumexp -> LeakyReLU twice -> GELU twice, in the single file that kernel benchmarks load.

Run as a script, it checks both models at a small size.

    python examples/kernel_benchmark/head_logsumexp.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from cupyfuse.torch import HeadLogSumExp

batch_size = 1024
in_features = 8192
out_features = 8192


class Model(nn.Module):
    """The head in plain PyTorch."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x):
        x = self.linear(x)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        x = F.leaky_relu(x, negative_slope=0.01)
        x = F.leaky_relu(x, negative_slope=0.01)
        x = F.gelu(x)
        return F.gelu(x)


class ModelNew(HeadLogSumExp):
    """The fused head, with the constructor, random draws, parameter names and results of `Model`."""


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]


def check():
    """Exit unless `ModelNew` has the weights of `Model` and is as accurate against float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = []
    for cls in (Model, ModelNew):
        torch.manual_seed(0)
        models.append(cls(*get_init_inputs()).to(device))
        x = get_inputs()[0].to(device)
    plain, fused = models
    for (name, wanted), (other, found) in zip(plain.state_dict().items(), fused.state_dict().items(), strict=True):
        if name != other or not torch.equal(wanted, found):
            raise SystemExit(f"{name} and {other} are not the same weights")
    with torch.no_grad():
        results = [plain(x).double(), fused(x).double()]
        exact = plain.double()(x.double())
    errors = [float((result - exact).abs().max()) for result in results]
    print(f"largest error against float64: {errors[1]:.2g} fused, {errors[0]:.2g} plain")
    # Allow a few roundings for the order of sums.
    if not errors[1] <= errors[0] + 4 * 2.0**-24 * float(exact.abs().max()):
        raise SystemExit("the fused result is less accurate than the plain one")


if __name__ == "__main__":
    batch_size, in_features, out_features = 64, 512, 768
    check()
