"""Time the loss of a language model, from features to the mean cross entropy, and its gradients; and its memory.

Errors are those of the loss and of both gradients against float64, computed block by block.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from . import options as types
from .lab import Lab, run
from .report import Case, Report, Requirement
from .rivals import COMPILED, EAGER, Rival, Unavailable, as_run_by
from .tables import ERROR, case_tables, explain, findings_table

OURS, PRODUCT = "cupyfuse.torch", "the product alone"
ROOMY, _ROOM = "cupyfuse.torch, max_workspace of 4 GiB", 4 << 30  # logits of 16 bits may be kept
LIGER, CCE, QUACK = "Liger", "cut-cross-entropy", "QuACK"
_LIBRARIES = {
    OURS: ("cupyfuse.torch", "linear_cross_entropy"),
    ROOMY: ("cupyfuse.torch", "linear_cross_entropy"),
    LIGER: ("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss"),
    CCE: ("cut_cross_entropy", "linear_cross_entropy"),
    QUACK: ("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
}
FORWARD, BACKWARD = "Forward", "Forward and backward"
FIGURES = ("gpu_evicted", "wall")
DEFAULTS = {
    "budget": (0.5, 0.05),
    "shapes": (
        ((8192, 4096, 128256, "bfloat16"), (8192, 2304, 256000, "bfloat16"), (4096, 2048, 32000, "float32")),
        ((1024, 1024, 32000, "bfloat16"),),
    ),
}
REQUIREMENTS = (
    Requirement("gpu_evicted", (OURS,), 1.08, (PRODUCT,)),
    Requirement("error", (OURS,), 1.0, (EAGER,), group=BACKWARD),
)
_BLOCK = 512  # rows of the reference that are computed at once
_IGNORED = -100
_HOW = f"""\
{ERROR}, the worst of the loss and, after a backward pass, of the gradients.
- *{PRODUCT}* is that of the logits, and backward those of both gradients, on logits in the operands' dtype;
  *{EAGER}* converts the logits to float32. *{OURS}* has the default `max_workspace`, 256 MiB. *peak MB*: the most
  beyond the operands, gradients included."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_shape(parser, None, "one shape instead of all")
    # Reports are named by an option `dtype`; of this benchmark there is one, with several dtypes.
    parser.add_argument("--dtype", dest="operands", choices=types.DTYPES, default="bfloat16", help="of --shape")


def evaluate(torch: Any, x: Any, weight: Any, labels: Any) -> list[Any]:
    """Compute the loss and the gradients in float64, for a block of rows at a time."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    count, loss = int((labels != _IGNORED).sum()), torch.zeros((), dtype=x.dtype, device=x.device)
    with torch.enable_grad():
        for rows, targets in zip(x.split(_BLOCK), labels.split(_BLOCK), strict=True):
            logits = rows @ weight.T
            part = torch.nn.functional.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="sum") / count
            part.backward()
            loss += part.detach()
    return [loss, x.grad, weight.grad]


def loss_of(lab: Lab, rival: str, x: Any, weight: Any, labels: Any) -> Callable[[], Any]:
    """Return the loss of the features as a rival computes it."""
    if rival in (EAGER, COMPILED):
        functional = lab.need_torch().F

        def eager() -> Any:
            return functional.cross_entropy(functional.linear(x, weight).float(), labels, ignore_index=_IGNORED)

        return as_run_by(rival, lab, eager)
    module, name = _LIBRARIES[rival]
    try:
        loss = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Unavailable(f"{rival} is not installed: {error}") from error
    if rival == LIGER:
        return functools.partial(loss(ignore_index=_IGNORED), weight, x, labels)
    options = {"max_workspace": _ROOM} if rival == ROOMY else {}
    return functools.partial(loss, x, weight, labels, ignore_index=_IGNORED, **options)


def cases_of(lab: Lab, shape: tuple[int, int, int], dtype: str, options: argparse.Namespace) -> Iterator[Case]:
    """Run every rival, forward, then forward and backward."""
    rows, features, classes = shape
    pytorch = lab.need_torch()
    torch, device = pytorch.torch, pytorch.device_type()
    torch.manual_seed(options.seed)
    scale = features**-0.5  # logits of size one
    x = torch.randn(rows, features, device=device).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(classes, features, device=device) * scale).to(x.dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), device=device)
    labels[:: max(rows // 8, 1)] = _IGNORED
    expected = evaluate(torch, x, weight, labels)

    def step(rival: str, leaves: tuple[Any, ...]) -> Any:
        return pytorch.Step(loss_of(lab, rival, x, weight, labels), leaves)

    def loss(rival: str, leaves: tuple[Any, ...]) -> Rival:
        made = step(rival, leaves)
        return Rival(made, [made.results], expected[: 1 + len(leaves)])

    def product(backward: bool) -> Rival:
        """Return the product of the logits, and the two of its gradients: the least that all have to compute."""
        a, b = x.detach(), weight.detach()

        def call() -> None:
            y = a @ b.T
            if backward:
                y @ b, y.T @ a

        return Rival(call, [], [])

    for group, leaves in ((FORWARD, ()), (BACKWARD, (x, weight))):
        case = Case(group, f"{' x '.join(map(str, shape))}, {dtype}", shape, dtype)
        names = (OURS, *([ROOMY] if leaves else []), EAGER, COMPILED, LIGER, CCE, QUACK)
        rivals = {rival: functools.partial(loss, rival, leaves) for rival in names}
        rivals[PRODUCT] = functools.partial(product, group == BACKWARD)
        with torch.set_grad_enabled(group == BACKWARD):
            run(lab, case, rivals, FIGURES, options.budget)
            for result in case.results:
                if result.rival != PRODUCT and not result.failure:
                    made = step(result.rival, leaves)
                    made.drop_gradients()
                    case.facts[f"peak MB, {result.rival}"] = pytorch.measure_memory(made).peak / 1e6
        yield case


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every shape."""
    shapes = options.shapes if options.shape is None else ((*options.shape, options.operands),)
    for *shape, dtype in shapes:
        lab.release()
        yield from cases_of(lab, tuple(shape), dtype, options)


def report_lines(report: Report) -> list[str]:
    lines = [*findings_table(REQUIREMENTS, report.cases), *explain(FIGURES, _HOW)]
    return [*lines, *case_tables(report, EAGER, ["gpu_evicted"])]
