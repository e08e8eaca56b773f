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
LIGER, CCE, QUACK = "Liger", "cut-cross-entropy", "QuACK"
_LIBRARIES = {
    OURS: ("cupyfuse.torch", "linear_cross_entropy"),
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
  *{EAGER}* converts the logits to float32. *peak MB*: the most beyond the operands, gradients included."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_shape(parser, None, "one shape instead of all")
    # Reports are named by an option `dtype`; of this benchmark there is one, with several dtypes.
    parser.add_argument("--dtype", dest="operands", choices=types.DTYPES, default="bfloat16", help="of --shape")


class Loss:
    """One shape: features, weight and labels, the results in float64, and how each rival computes them."""

    def __init__(self, lab: Lab, shape: tuple[int, int, int], dtype: str, seed: int):
        self._lab, self._rivals = lab, lab.need_torch()
        torch = self._torch = self._rivals.torch
        rows, features, classes = shape
        device = self._rivals.device_type()
        torch.manual_seed(seed)
        scale = features**-0.5  # logits of size one
        self._x = torch.randn(rows, features, device=device).to(getattr(torch, dtype)).requires_grad_()
        self._weight = (torch.randn(classes, features, device=device) * scale).to(self._x.dtype).requires_grad_()
        self._labels = torch.randint(classes, (rows,), device=device)
        self._labels[:: max(rows // 8, 1)] = _IGNORED
        self._expected = self._reference()

    def _reference(self) -> list[Any]:
        """Compute the loss and the gradients in float64, for a block of rows at a time."""
        torch = self._torch
        x, weight = self._x.detach().double(), self._weight.detach().double()
        count = int((self._labels != _IGNORED).sum())
        loss, x_gradients = torch.zeros((), dtype=x.dtype, device=x.device), []
        weight_gradient = torch.zeros_like(weight)
        for start in range(0, len(x), _BLOCK):
            block, labels = x[start : start + _BLOCK], self._labels[start : start + _BLOCK]
            counted, label = labels != _IGNORED, labels.clamp(min=0)
            logarithms = torch.log_softmax(block @ weight.T, 1)
            loss -= torch.where(counted, logarithms.gather(1, label[:, None])[:, 0], 0).sum() / count
            # The gradient by the logits: probabilities, less one at the label.
            by_logits = logarithms.exp_()
            by_logits[range(len(block)), label] -= 1
            by_logits = torch.where(counted[:, None], by_logits, 0) / count
            x_gradients.append(by_logits @ weight)
            weight_gradient += by_logits.T @ block
        return [loss, torch.cat(x_gradients), weight_gradient]

    def cases(self, case: Callable[[str], Case], budget: float) -> Iterator[Case]:
        """Run every rival, forward, then forward and backward, in the cases that `case` makes for a group."""
        for group, leaves in ((FORWARD, ()), (BACKWARD, (self._x, self._weight))):
            found = case(group)
            rivals = (OURS, EAGER, COMPILED, LIGER, CCE, QUACK)
            factories = {rival: functools.partial(self._rival, rival, leaves) for rival in rivals}
            factories[PRODUCT] = functools.partial(self._product, group == BACKWARD)
            with self._torch.set_grad_enabled(group == BACKWARD):
                run(self._lab, found, factories, FIGURES, budget)
                for result in found.results:
                    if result.rival != PRODUCT and not result.failure:
                        step = self._rivals.Step(self._loss(result.rival), leaves)
                        step.drop_gradients()
                        found.facts[f"peak MB, {result.rival}"] = self._rivals.measure_memory(step).peak / 1e6
            yield found

    def _loss(self, rival: str) -> Callable[[], Any]:
        """Return the loss of the features as a rival computes it."""
        if rival in (EAGER, COMPILED):
            return as_run_by(rival, self._lab, self._eager)
        module, name = _LIBRARIES[rival]
        try:
            loss = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise Unavailable(f"{rival} is not installed: {error}") from error
        if rival == LIGER:
            return functools.partial(loss(ignore_index=_IGNORED), self._weight, self._x, self._labels)
        return functools.partial(loss, self._x, self._weight, self._labels, ignore_index=_IGNORED)

    def _eager(self) -> Any:
        functional = self._torch.nn.functional
        logits = functional.linear(self._x, self._weight).float()
        return functional.cross_entropy(logits, self._labels, ignore_index=_IGNORED)

    def _rival(self, rival: str, leaves: tuple[Any, ...]) -> Rival:
        step = self._rivals.Step(self._loss(rival), leaves)
        return Rival(step, [step.results], self._expected[: 1 + len(leaves)])

    def _product(self, backward: bool) -> Rival:
        """Return the product of the logits, and the two of its gradients: the least that all have to compute."""
        x, weight = self._x.detach(), self._weight.detach()

        def call() -> None:
            y = x @ weight.T
            if backward:
                y @ weight, y.T @ x

        return Rival(call, [], [])


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every shape, forward, then forward and backward."""
    shapes = options.shapes if options.shape is None else ((*options.shape, options.operands),)
    for *shape, dtype in shapes:
        lab.release()
        name = f"{' x '.join(map(str, shape))}, {dtype}"
        case = functools.partial(Case, name=name, shape=tuple(shape), dtype=dtype)
        yield from Loss(lab, tuple(shape), dtype, options.seed).cases(case, options.budget)


def report_lines(report: Report) -> list[str]:
    lines = [*findings_table(REQUIREMENTS, report.cases), *explain(FIGURES, _HOW)]
    return [*lines, *case_tables(report, EAGER, ["gpu_evicted"])]
