"""Linear -> BatchNorm1d -> scale -> softmax, in the single file that kernel benchmarks load.

Run as a script, it checks both models at a small size.

Nothing here calls `.eval()`: both models normalise with the statistics of the batch, and update the running ones.

    python examples/kernel_benchmark/head_softmax.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from cupyfuse.torch import HeadSoftmax

batch_size = 1024
in_features = 8192
out_features = 8192
bn_eps = 1e-5
bn_momentum = 0.1
scale_shape = (1,)


class Model(nn.Module):
    """The head in plain PyTorch."""

    def __init__(self, in_features, out_features, bn_eps=1e-5, bn_momentum=0.1, scale_shape=(1,)):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        x = self.gemm(x)
        x = self.bn(x)
        x = self.scale * x
        return self.softmax(x)


class ModelNew(HeadSoftmax):
    """The fused head, with the constructor, random draws, parameter names and results of `Model`."""


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, bn_eps, bn_momentum, scale_shape]


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
    exact = copy.deepcopy(plain).double()
    found = []
    with torch.no_grad():
        for model, batch in ((plain, x), (fused, x), (exact, x.double())):
            out = model(batch)
            found.append({"result": out, "running_mean": model.bn.running_mean, "running_var": model.bn.running_var})
    for name, right in found[2].items():
        errors = [float((values[name] - right).abs().max()) for values in found[:2]]
        print(f"largest error of {name} against float64: {errors[1]:.2g} fused, {errors[0]:.2g} plain")
        # Allow a few roundings for the order of sums.
        if not errors[1] <= errors[0] + 4 * 2.0**-24 * float(right.abs().max()):
            raise SystemExit(f"{name}: the fused one is less accurate than the plain one")


if __name__ == "__main__":
    batch_size, in_features, out_features = 64, 512, 768
    check()
