"""Conversions of tensors to the dtype that they have: what they return is their argument."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_support import Graphs

import cupyfuse.torch as ct


def test_they_are_no_further_inputs() -> None:
    """As of models that compute a norm in float32: the operand is one, and so is its gradient."""

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return scale * h.float().type_as(x).contiguous() + x.to(x)

    graphs = Graphs()
    x, scale = torch.randn(6, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    found = torch.compile(norm, backend=graphs)(x, scale)
    chains = [n for m in graphs.seen for n in m.graph.nodes if n.target is torch.ops.cupyfuse.chain.default]
    assert [len(n.all_input_nodes) for n in chains] == [2]
    torch.testing.assert_close(found, norm(x, scale), rtol=1e-5, atol=1e-6)


class Copies(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, same = x.to(torch.float32, copy=True), x.float()
        x.mul_(2.0)
        return torch.softmax(kept + 1, -1), torch.softmax(same + 1, -1), same


def test_copies_stay() -> None:
    """They do not see what is written to their argument later; what is returned is the argument itself."""
    x, y = torch.randn(6, 8), torch.empty(6, 8)
    y.copy_(x)
    found = ct.fuse(Copies(), only_gains=False)(x)
    torch.testing.assert_close(found, Copies()(y))
    assert found[2] is x
