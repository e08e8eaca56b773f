"""Functions on DTensors beside one process in float64: cases of `sharded_cases.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from sharded_case import FEATURES, ROWS, Here, case, require_same_everywhere, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import cupyfuse.torch as ct
from cupyfuse.torch.sharded.exchange import Group

LABELS = torch.tensor([1, 0, -100, 1, 0, 1, 0])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 1.0, 3.0, 0.5, 1.0, 2.0])
Function = Callable[[Any, Any, Any, Callable[[Any], Any]], Any]  # of x, weight, bias, and what places further tensors


def _loss(**options: Any) -> tuple[Function, Function]:
    """The fused loss, and PyTorch's."""
    weighted = options.pop("weighted", False)
    labels = options.pop("labels", LABELS)

    def ours(x: Any, w: Any, b: Any, place: Callable[[Any], Any]) -> Any:
        classes = place(CLASS_WEIGHTS[: w.shape[0]].to(w.dtype)) if weighted else None
        return ct.linear_cross_entropy(x, w, place(labels), b, class_weight=classes, **options)

    def plain(x: Any, w: Any, b: Any, place: Callable[[Any], Any]) -> Any:
        classes = CLASS_WEIGHTS[: w.shape[0]].to(w.dtype) if weighted else None
        logits = F.linear(x, w, b)
        known = {k: v for k, v in options.items() if k not in ("soft_cap", "max_workspace")}
        if "soft_cap" in options:
            logits = torch.tanh(logits / options["soft_cap"]) * options["soft_cap"]
        return F.cross_entropy(logits.double(), labels, None if classes is None else classes.double(), **known)

    return ours, plain


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "logsumexp": (lambda x, w, b, _: ct.linear_logsumexp(x, w, b), lambda x, w, b, _: F.linear(x, w, b).logsumexp(-1)),
    "softmax": (lambda x, w, b, _: ct.linear_softmax(x, w, b), lambda x, w, b, _: F.linear(x, w, b).softmax(-1)),
    "log_softmax": (
        lambda x, w, b, _: ct.linear_log_softmax(x, w, b),
        lambda x, w, b, _: F.linear(x, w, b).log_softmax(-1),
    ),
    "gelu": (lambda x, w, b, _: ct.linear_gelu(x, w, b), lambda x, w, b, _: F.gelu(F.linear(x, w, b))),
    "loss": _loss(),
    "loss by row": _loss(reduction="none"),
    "weighted loss": _loss(weighted=True, label_smoothing=0.1, ignore_index=1, labels=LABELS.clamp(0)),
    "loss without logits": _loss(max_workspace=16, soft_cap=3.0),
}
# Of x, weight and bias.
VOCABULARY = (Replicate(), Shard(0), Shard(0))
ACROSS = (Shard(0), Replicate(), Replicate())
WHOLE_BIAS = (Replicate(), Shard(0), Replicate())


def operands(classes: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(classes)
    shapes = ((ROWS, FEATURES), (classes, FEATURES), (classes,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def bounds(values: Sequence[Any], exact: Any, grads: Sequence[Any], cotangent: Any, classes: int) -> list[float]:
    """Bounds of float32 errors, of the result and of the three gradients.

    A logit has FEATURES + 1 roundings of the sum of its terms' sizes. Results move by at most twice as much, and have a
    rounding for each class and ten for functions of them. So do cotangents of logits, which softmax's backward pass
    sums over the classes; gradients are sums of these times an operand.
    """
    x, w, b = (t.double().abs() for t in values)
    u = 2.0**-24
    size = float((x @ w.T + b).max())
    logit = (FEATURES + 1) * u * size
    result = 2 * logit + (classes + 10) * u * (1 + size)
    slope = classes * float(cotangent.abs().max()) * (4 * logit + (classes + 10) * u * (1 + size))
    terms = [classes * float(w.max()), ROWS * float(x.max()), float(ROWS)]
    found = [n * slope + n * u * float(g.abs().max()) for n, g in zip(terms, grads, strict=True)]
    return [result + u * float(exact.abs().max()), *found]


def check(here: Here, name: str, placements: Any, classes: int, dtype: torch.dtype, mesh: Any = None) -> None:
    """Compare a function and its gradients with one process in float64."""
    mesh = mesh or here.mesh
    ours, plain = FUNCTIONS[name]
    values = operands(classes, dtype)
    exact = [t.double().requires_grad_() for t in values]
    y = plain(*exact, lambda t: t)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [y.detach(), *torch.autograd.grad(y, exact, cotangent)]

    def place(t: Any, by: Any = None) -> Any:
        listed = by if isinstance(by, list) else [by or Replicate()] * mesh.ndim
        return distribute_tensor(t, mesh, listed)

    sharded = [place(t, p).requires_grad_() for t, p in zip(values, placements, strict=True)]
    z = ours(*sharded, place)
    grads = torch.autograd.grad(z, sharded, place(cotangent.to(z.dtype)))
    assert not here.left, here.left
    require_same_everywhere(z, *grads)
    for grad, t in zip(grads, sharded, strict=True):
        assert grad.placements == t.placements and grad.dtype == dtype, (grad.placements, grad.dtype)
    errors = [float((whole(a).double() - b).abs().max()) for a, b in zip([z, *grads], wanted, strict=True)]
    if dtype is torch.float32:
        limits = bounds(values, y.detach(), wanted[1:], cotangent, classes)
    else:
        # As far as PyTorch's own operations in one process are, doubled, and a rounding of the result.
        narrow = [t.clone().requires_grad_() for t in values]
        r = plain(*narrow, lambda t: t)
        found = [r.detach(), *torch.autograd.grad(r, narrow, cotangent.to(r.dtype))]
        limits = [
            2 * float((a.double() - b).abs().max()) + 2.0**-8 * float(b.abs().max())
            for a, b in zip(found, wanted, strict=True)
        ]
    assert all(e <= most for e, most in zip(errors, limits, strict=True)), (errors, limits)


def _enter(name: str, how: str, placements: Any, classes: int, dtype: torch.dtype, *worlds: int) -> None:
    label = f"{name}, {how}, {classes} classes, {str(dtype).removeprefix('torch.')}"
    case(label, *worlds)(lambda here: check(here, name, placements, classes, dtype))


for function in FUNCTIONS:
    _enter(function, "vocabulary", VOCABULARY, 10, torch.float32, 2, 3)
    _enter(function, "vocabulary", VOCABULARY, 2, torch.float32, 3)  # one process has no class
for function in ("logsumexp", "softmax", "loss", "loss without logits"):
    _enter(function, "vocabulary", VOCABULARY, 10, torch.bfloat16, 2)
    _enter(function, "whole bias", WHOLE_BIAS, 10, torch.float32, 2)
    _enter(function, "rows", ACROSS, 10, torch.float32, 3)  # 3, 3 and 1 of them


@case("float64", 2)
def _float64(here: Here) -> None:
    x, w, b = operands(10, torch.float64)
    placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), VOCABULARY, strict=True)]
    error = (whole(ct.linear_logsumexp(*placed)) - F.linear(x, w, b).logsumexp(-1)).abs().max()
    assert error < 1e-14 and not here.left, error


@case("special values", 2)
def _special(here: Here) -> None:
    """-inf in all of one process's columns, in all columns; NaN in one."""
    for where in (slice(0, 5), slice(0, 10), slice(7, 8)):
        y = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
        y[1, where] = -torch.inf
        y[2, where] = torch.nan
        y[3, where] = torch.inf
        sharded = distribute_tensor(y, here.mesh, [Shard(1)])
        for ours, plain in ((ct.logsumexp, torch.logsumexp), (ct.softmax, torch.softmax)):
            torch.testing.assert_close(whole(ours(sharded, 1)), plain(y, 1), equal_nan=True)
    assert not here.left


@case("addends", 2)
def _addends(here: Here) -> None:
    """Features of which each process has an addend, as behind a `RowwiseParallel` layer, are summed first."""
    x, w, b = (t.double() for t in operands(10, torch.float32))
    exact = [t.clone().requires_grad_() for t in (x, w, b)]
    F.linear(*exact).logsumexp(-1).sum().backward()
    own = (x * (0.25 + 0.5 * here.rank)).requires_grad_()  # a quarter and three quarters
    addends = DTensor.from_local(own, here.mesh, [Partial()], run_check=False)
    placed = [distribute_tensor(t, here.mesh, [Shard(0)]).requires_grad_() for t in (w, b)]
    y = ct.linear_logsumexp(addends, *placed)
    y.full_tensor().sum().backward()
    torch.testing.assert_close(whole(y), F.linear(x, w, b).logsumexp(-1))
    for t, wanted in zip((own, *placed), exact, strict=True):
        torch.testing.assert_close(whole(t.grad), wanted.grad)
    assert not here.left


@case("what is exchanged", 2, 3)
def _exchanged(here: Here) -> None:
    """One gather of two float32 numbers for each row, and of no logits; a third one for the label's."""
    x, w, b = operands(300, torch.float32)
    placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), VOCABULARY, strict=True)]
    ct.linear_logsumexp(*placed)
    assert here.gathered == [8 * ROWS], here.gathered
    ct.linear_softmax(*placed)
    assert here.gathered == [8 * ROWS] * 2, here.gathered
    ct.linear_cross_entropy(placed[0], placed[1], distribute_tensor(LABELS, here.mesh, [Replicate()]), placed[2])
    assert here.gathered == [8 * ROWS] * 2 + [12 * ROWS], here.gathered


@case("states of several dtypes", 2, 3)
def _several_dtypes(here: Here) -> None:
    """Each begins where its dtype can in the bytes of every process, also of an odd number of rows."""
    parts = [torch.arange(7.0)[:, None] + here.rank, torch.arange(7)[:, None] * here.rank, torch.ones(7, 1) > 0]
    for rank, state in enumerate(Group(here.mesh, 0)._gather(parts)):
        expected = [torch.arange(7.0)[:, None] + rank, torch.arange(7)[:, None] * rank, torch.ones(7, 1) > 0]
        for got, want in zip(state, expected, strict=True):
            torch.testing.assert_close(got, want)


@case("sums in place", 2, 3)
def _sums_in_place(here: Here) -> None:
    """An addend is all-reduced where it is, but not where others have a part of its memory."""
    contraction = SimpleNamespace(reductions=[(None, SimpleNamespace(name="contraction", names=("sum",)))])
    for place, shares in ((slice(0, 4), False), (slice(0, 4), True), (slice(1, 3), True)):
        part = torch.ones(4, 4) * (1 + here.rank)
        others = [part[place]] if shares else [torch.ones(4, 4), None]
        (merged,) = Group(here.mesh, 0).merge(contraction, [part], None, others)
        total = here.count * (here.count + 1) // 2
        torch.testing.assert_close(merged, torch.full((4, 4), float(total)))
        torch.testing.assert_close(part, torch.full((4, 4), float(1 + here.rank if shares else total)))


@case("second derivatives", 2)
def _twice(here: Here) -> None:
    x, w, b = operands(10, torch.float64)

    def second(x: Any, w: Any, b: Any, function: Callable[..., Any]) -> Any:
        (grad,) = torch.autograd.grad(function(x, w, b).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), w)[0]

    exact = second(*(t.clone().requires_grad_() for t in (x, w, b)), lambda x, w, b: F.linear(x, w, b).logsumexp(-1))
    pairs = zip((x, w, b), VOCABULARY, strict=True)
    placed = [distribute_tensor(t, here.mesh, [p]).requires_grad_() for t, p in pairs]
    torch.testing.assert_close(whole(second(*placed, ct.linear_logsumexp)), exact)


# What is left to PyTorch --------------------------------------------------------------------------------------------


@case("left to PyTorch", 2)
def _left(here: Here) -> None:
    """A product that sums over the split dimension, rows and columns split by one dimension, plain tensors."""
    x, w, b = operands(10, torch.float32)
    exact = F.gelu(F.linear(x, w, b))
    for placements, reason in (
        ((Shard(1), Shard(1), Replicate()), "addends"),
        ((Shard(0), Shard(0), Shard(0)), "split to different widths"),
    ):
        here.left.clear()
        placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), placements, strict=True)]
        torch.testing.assert_close(whole(ct.linear_gelu(*placed)), exact)
        assert len(here.left) == 1 and reason in here.left[0], here.left
    here.left.clear()
    sharded = distribute_tensor(w, here.mesh, [Shard(0)])
    try:
        ct.linear_gelu(x, sharded, b)
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error), error
    else:
        raise AssertionError("PyTorch refuses plain tensors beside DTensors")
    assert "is no DTensor" in here.left[0], here.left


# Two dimensions of a mesh -------------------------------------------------------------------------------------------


@case("rows and vocabulary", 4)
def _rows_and_vocabulary(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(0)])
    for name in ("softmax", "weighted loss", "loss by row"):
        check(here, name, placements, 3, torch.float32, mesh)
    turned = tuple(list(reversed(p)) for p in placements)
    for name in ("softmax", "loss"):
        check(here, name, turned, 10, torch.float32, mesh)
