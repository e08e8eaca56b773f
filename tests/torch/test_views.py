"""Views and indices of the results of products: chains grow over them, so that losses keep no logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyfuse.torch as ct
from cupyfuse.torch.chains import custom_op

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CLASSES, TEXTS, TOKENS = 503, 3, 40
SMALL = 60_000  # bytes: a quarter of the logits


class Model(nn.Module):
    """A last layer, and code that reads its result and labels."""

    def __init__(self, code: Callable[..., Any], features: int = 32, classes: int = CLASSES):
        super().__init__()
        self.head, self.code = nn.Linear(features, classes), code
        self.register_buffer("weight", torch.linspace(0.5, 1.5, classes))

    def forward(self, x: Any, labels: Any) -> Any:
        return self.code(self, self.head(x), labels)


# What keeps no logits ------------------------------------------------------------------------------------------------


def shifted(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def shifted_as_float(m: Any, y: Any, labels: Any) -> Any:
    logits = y.float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1))


def shifted_with_a_soft_cap(m: Any, y: Any, labels: Any) -> Any:
    y = torch.tanh(y / 2.0) * 2.0 * m.weight
    return F.cross_entropy(y[:, 1:].flatten(0, 1), labels[:, :-1].flatten(), reduction="sum")


def of_the_last_token(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y[:, -1], labels[:, -1])


def of_every_other_token(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y[:, ::2].reshape(-1, CLASSES), labels[:, ::2].reshape(-1))


def classes_second(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.transpose(1, 2), labels, m.weight, ignore_index=7, label_smoothing=0.1)


def classes_second_for_each(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.permute(0, 2, 1).float(), labels, reduction="none").square().mean()


def classes_second_with_probabilities(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.mT, F.one_hot(labels, CLASSES).float().mT)


def classes_second_of_four_dimensions(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.view(TEXTS, 5, 8, CLASSES).permute(0, 3, 1, 2), labels.view(TEXTS, 5, 8))


def logarithms_with_classes_second(m: Any, y: Any, labels: Any) -> Any:
    return F.nll_loss(torch.log_softmax(y.transpose(1, 2), 1), labels)


def shifted_with_classes_second(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y[:, :-1].transpose(1, 2), labels[:, 1:])


def indexed(m: Any, y: Any, labels: Any) -> Any:
    logarithms = torch.log_softmax(y.flatten(0, 1), -1)
    return -logarithms[torch.arange(len(logarithms)), labels.flatten()].mean()


def indexed_from_the_end(m: Any, y: Any, labels: Any) -> Any:
    rows = y.flatten(0, 1).log_softmax(1)
    return -rows[torch.arange(0, TEXTS * TOKENS), labels.flatten() - CLASSES].mean()


def categorical(m: Any, y: Any, labels: Any) -> Any:
    chosen = torch.distributions.Categorical(logits=y)
    return (-chosen.log_prob(labels) - 0.1 * chosen.entropy()).mean()


WITHOUT_LOGITS = (
    *(shifted, shifted_as_float, shifted_with_a_soft_cap, of_the_last_token, of_every_other_token, classes_second),
    *(classes_second_for_each, classes_second_with_probabilities, classes_second_of_four_dimensions),
    *(logarithms_with_classes_second, shifted_with_classes_second, indexed, indexed_from_the_end, categorical),
)


def drawn(rows: int = TEXTS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, TOKENS, 32, requires_grad=True), torch.randint(CLASSES, (rows, TOKENS))


def trained(module: Any, x: Any, labels: Any) -> tuple[Any, ...]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    loss = module(x, labels)
    loss.backward()
    return (loss.detach(), x.grad, *(p.grad for p in module.parameters()))


@pytest.mark.rotates
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("code", WITHOUT_LOGITS)
def test_no_logits_are_kept(code: Any, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "_compiled", {})
    plain, (x, labels) = Model(code), drawn()
    expected = trained(copy.deepcopy(plain), x, labels)
    if compiles:
        options = {"cupyfuse.max_workspace": SMALL, "cupyfuse.only_gains": False}
        module: Any = torch.compile(plain, backend="cupyfuse", options=options)
    else:
        module = ct.fuse(plain, max_workspace=SMALL, only_gains=False)
    torch.testing.assert_close(trained(module, x, labels), expected, rtol=1e-5, atol=1e-5)
    if compiles:
        plans = [c.plan for c in custom_op._compiled.values() if c.is_loaded]
    else:
        plans = [plan for part in module.explain().fused for plan in part.plans]
    (plan,) = (plan for plan in plans if "linear" in plan.name)
    assert all(math.prod(o.shape) < TOKENS * CLASSES for o in plan.outputs)


@pytest.mark.parametrize(
    "code",
    [lambda w, x: x @ w.T, lambda w, x: x @ w.mT, lambda w, x: (w @ x.T).T, lambda w, x: (w * 2).mT @ (x.exp().T * 3)],
)
def test_transposes_that_are_attributes(code: Any) -> None:
    """They are operators from PyTorch 2.14 on."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 49).view(7, 7))

        def forward(self, x: Any) -> Any:
            return code(self.weight, x).softmax(-1)

    module, x = Module(), torch.randn(7, 7)
    fused = ct.fuse(module, only_gains=False)
    torch.testing.assert_close(fused(x), module(x))
    report = fused.explain()
    assert sum(name == "matmul" for part in report.fused for name in part.operations) == 1
    assert "0 operations left" in str(report)


@pytest.mark.rotates
@pytest.mark.parametrize("code", [shifted, classes_second_for_each, indexed, categorical])
def test_sizes_vary(code: Any) -> None:
    module = ct.fuse(plain := Model(code), max_workspace=SMALL, only_gains=False)
    for rows in (3, 4, 5):
        x, labels = drawn(rows)
        torch.testing.assert_close(trained(module, x, labels), trained(plain, x, labels), rtol=1e-5, atol=1e-5)
    assert len(module._cupyfuse.partitions) == 2
    assert {"linear"} < set(module.explain().fused[-1].operations)


@pytest.mark.parametrize("code", [shifted, classes_second])
def test_autocast(code: Any) -> None:
    """The product of the slice computes in the dtype of the whole one."""
    module = ct.fuse(plain := Model(code), only_gains=False)
    x, labels = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = trained(module, x, labels), trained(plain, x, labels)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-3)


# What stays as it is -------------------------------------------------------------------------------------------------


def logits_are_returned(m: Any, y: Any, labels: Any) -> Any:
    return shifted(m, y, labels), y


def a_part_is_returned(m: Any, y: Any, labels: Any) -> Any:
    part = y[:, :-1]
    return F.cross_entropy(part.reshape(-1, CLASSES), labels[:, 1:].reshape(-1)), part


def a_view_of_a_part_is_returned(m: Any, y: Any, labels: Any) -> Any:
    part = y[:, 3:].transpose(0, 1)
    return part.sin().sum(), part


def a_part_is_written_to(m: Any, y: Any, labels: Any) -> Any:
    y[:, 2:].mul_(2.0)
    return y.logsumexp(-1)


def a_copy_of_a_part_is_written_to(m: Any, y: Any, labels: Any) -> Any:
    part = y[:, :-1]
    rows = part.reshape(-1, CLASSES)
    rows += 1.0
    return part.exp().mean() + rows.square().mean()


def logits_are_written_to_later(m: Any, y: Any, labels: Any) -> Any:
    y = y * 2
    logarithms = torch.log_softmax(y.mT.float(), 1)
    return F.nll_loss(logarithms, labels, reduction="none") + y.detach().zero_().sum(), y.exp()


def what_is_repeated_is_returned(m: Any, y: Any, labels: Any) -> Any:
    first, second = torch.broadcast_tensors(y.sum(-1, keepdim=True).exp(), y)
    return first, second, y, first[..., :1]


def some_columns(m: Any, y: Any, labels: Any) -> Any:
    return y[..., 1:].logsumexp(-1)


def other_rows(m: Any, y: Any, labels: Any) -> Any:
    rows = y.flatten(0, 1).log_softmax(-1)
    return rows[torch.arange(len(rows)) - 1, labels.flatten()], rows[torch.arange(1, 4), labels.flatten()[:3]]


def rows_and_some_labels(m: Any, y: Any, labels: Any) -> Any:
    rows = y.flatten(0, 1).log_softmax(-1)
    return rows[torch.arange(len(rows)), labels[:, :1].reshape(-1)[:1]], rows[torch.arange(3), labels.flatten()[:3]]


def rows_from_another_start(m: Any, y: Any, labels: Any) -> Any:
    rows = y.flatten(0, 1).log_softmax(-1)
    return rows[torch.arange(-1, end=len(rows) - 1), labels.flatten()]


def rows_that_were_changed(m: Any, y: Any, labels: Any) -> Any:
    rows = y.flatten(0, 1).log_softmax(-1)
    moved, some = torch.arange(len(rows)), torch.arange(len(rows))
    moved.sub_(1)
    some[3:7].zero_()
    return rows[moved, labels.flatten()], rows[some, labels.flatten()]


def an_element_that_was_not_repeated(m: Any, y: Any, labels: Any) -> Any:
    first, _ = torch.broadcast_tensors(y.logsumexp(-1, keepdim=True), y)
    return first[:1, ..., :1], first[..., :2], torch.broadcast_tensors(y, y)[0][..., :1].exp()


def repeated_by_both(m: Any, y: Any, labels: Any) -> Any:
    rows, columns = torch.broadcast_tensors(y.sum(-1, keepdim=True), y.sum(1, keepdim=True))
    return rows * 2, columns * 3


def other_dimensions_exchanged(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.permute(1, 2, 0), labels.t())


def classes_second_for_each_with_probabilities(m: Any, y: Any, labels: Any) -> Any:
    return F.cross_entropy(y.mT, y.softmax(-1).mT, reduction="none")


@torch.library.custom_op("cupyfuse_tests::triple", mutates_args=("x",))
def triple(x: torch.Tensor) -> None:
    x.mul_(3)


@triple.register_fake
def _(x: torch.Tensor) -> None:
    pass


def an_operator_writes_to_a_copy(m: Any, y: Any, labels: Any) -> Any:
    part = y[:, :-1]
    rows = part.reshape(-1, CLASSES)
    with torch.no_grad():
        triple(rows)
    return part.logsumexp(-1), rows.logsumexp(-1)


def the_operand_is_written_to(m: Any, y: Any, labels: Any) -> Any:
    weight = m.head.weight.detach()
    operand = weight.clone()
    product = operand @ weight.t()
    operand.mul_(0.0)
    return product[1:].logsumexp(-1), y.sum()


def slopes_of_the_second_dimension(m: Any, y: Any, labels: Any) -> Any:
    return F.prelu(y, torch.linspace(0.1, 0.9, TOKENS))[:, 1:].logsumexp(-1)


def a_matrix_for_a_bias(m: Any, y: Any, labels: Any) -> Any:
    product = F.linear(m.head.weight * 2, m.head.weight, torch.ones(CLASSES, CLASSES))
    return product[1:].logsumexp(-1), y.sum()


def a_part_has_no_gradients(m: Any, y: Any, labels: Any) -> Any:
    product = F.linear(m.head.weight * 2, m.head.weight)
    with torch.no_grad():
        part = product[1:]
    return part.logsumexp(-1), y.mean()


def logarithms_in_another_dtype(m: Any, y: Any, labels: Any) -> Any:
    return F.nll_loss(F.log_softmax(y.mT, 1, dtype=torch.float64), labels)


def logarithms_have_no_gradients(m: Any, y: Any, labels: Any) -> Any:
    with torch.no_grad():
        logarithms = torch.log_softmax(y.mT, 1)
    return F.nll_loss(logarithms, labels) * m.head.bias[0], y.mean()


def logits_are_written_to_before_the_loss(m: Any, y: Any, labels: Any) -> Any:
    memory = y.detach().flatten() * 2
    logits = memory.view(y.shape).mT
    copy, changed = logits.contiguous(), logits.sin()
    memory[7:].zero_()
    return F.cross_entropy(copy, labels), F.cross_entropy(changed, labels), y.sum()


AS_IT_IS = (
    *(an_operator_writes_to_a_copy, the_operand_is_written_to, slopes_of_the_second_dimension, a_matrix_for_a_bias),
    *(a_part_has_no_gradients, logarithms_in_another_dtype, logarithms_have_no_gradients),
    logits_are_written_to_before_the_loss,
    *(logits_are_returned, a_part_is_returned, a_view_of_a_part_is_returned, a_part_is_written_to),
    *(logits_are_written_to_later, what_is_repeated_is_returned),
    *(a_copy_of_a_part_is_written_to, some_columns, other_rows, rows_and_some_labels, an_element_that_was_not_repeated),
    *(rows_from_another_start, rows_that_were_changed),
    *(repeated_by_both, other_dimensions_exchanged, classes_second_for_each_with_probabilities),
)


@pytest.mark.rotates
@pytest.mark.parametrize("code", AS_IT_IS)
def test_other_views_are_as_in_eager(code: Any) -> None:
    plain, (x, labels) = Model(code), drawn()
    if code is rows_and_some_labels:
        labels = labels[:1].expand(TEXTS, -1)
    module = ct.fuse(plain, only_gains=False)
    found, expected = (torch.utils._pytree.tree_leaves(each(x, labels)) for each in (module, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    gradients = [
        torch.autograd.grad(sum(t.square().mean() for t in results), (x, *each.parameters()))
        for each, results in ((module, found), (plain, expected))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def channels_last(m: Any, y: Any, labels: Any) -> Any:
    return m.head(torch.ones(2, 3, 4, 32)).contiguous(memory_format=torch.channels_last)[0].logsumexp(-1)


def copies_are_returned(m: Any, y: Any, labels: Any) -> Any:
    """They would share memory."""
    part = m.head(torch.ones(2, 3, 32))[:, :-1]
    return part.logsumexp(-1), part.contiguous(), part.reshape(-1, CLASSES)


@pytest.mark.parametrize("code", [channels_last, copies_are_returned])
def test_slices_that_stay(code: Any) -> None:
    x, labels = drawn()
    module = ct.fuse(plain := Model(code), only_gains=False)
    torch.testing.assert_close(module(x, labels), plain(x, labels))
    (captured,) = (p.captured for p in module._cupyfuse.partitions)
    names = [o.name for o in reversed(captured.operations)]
    assert names.index("getitem") < names.index("linear")


def test_rows_that_are_not_read_reach_no_gradient() -> None:
    """PyTorch multiplies them by zero, which makes NaN of NaN."""
    module, (x, labels) = ct.fuse(Model(shifted), only_gains=False), drawn()
    with torch.no_grad():
        x[:, -1] = torch.nan
    loss, _, *gradients = trained(module, x, labels)
    assert all(torch.isfinite(t).all() for t in (loss, *gradients))


def test_a_product_that_makes_rows_shorter_is_sliced() -> None:
    """Its operand would take longer to slice than its result."""

    def code(m: Any, y: Any, labels: Any) -> Any:
        return F.cross_entropy(y[:, :-1].reshape(-1, 5), labels[:, 1:].reshape(-1))

    x, labels = torch.randn(TEXTS, TOKENS, 32), torch.randint(5, (TEXTS, TOKENS))
    module = ct.fuse(plain := Model(code, classes=5), only_gains=False)
    torch.testing.assert_close(module(x, labels), plain(x, labels))
    (captured,) = (p.captured for p in module._cupyfuse.partitions)
    assert [o.name for o in captured.operations][:2] == ["linear", "getitem"]
