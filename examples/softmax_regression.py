"""Softmax regression in NumPy: the loss, its gradient written by hand, and both in one plan without the logits.

The plain function computes all logits, and their gradient. Fused, a plan computes them for a block of rows at a time,
adds up the gradient of the weight, and never holds more than `max_workspace`. Both are trained for some steps and
compared with float64; then a table, and with `--plot` a plot (by matplotlib), of memory over the number of classes.

    python examples/softmax_regression.py [--plot FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from common import compare_losses, draw_memory

import cupyfuse as cf

ROWS, FEATURES, CLASSES = 600, 32, 200
STEPS, RATE = 40, 2.0
WORKSPACE = 100_000  # bytes: a fifth of the logits


def loss_and_gradient(x: Any, weight: Any, labels: Any) -> Any:
    """Return the mean cross entropy of ``x @ weight.T``, and its gradient by the weight."""
    logits = x @ weight.T
    loss = cf.cross_entropy(logits, labels)
    correct = labels[:, None] == np.arange(weight.shape[0])
    error = cf.softmax(logits, axis=1) - np.where(correct, 1.0, 0.0).astype(logits.dtype)
    return loss, error.T @ x / float(x.shape[0])


def plain(x: Any, weight: Any, labels: Any) -> Any:
    """Compute what `loss_and_gradient` does in NumPy alone."""
    logits = x @ weight.T
    logits = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = (np.log(total[:, 0]) - logits[rows, labels]).mean()
    error = exponentials / total
    error[rows, labels] -= 1
    return loss, error.T @ x / len(x)


def train(function: Callable[..., Any], x: Any, labels: Any) -> list[float]:
    """Descend along the gradient; return the loss of every step."""
    weight = np.zeros((CLASSES, x.shape[1]), x.dtype)
    losses = []
    for _ in range(STEPS):
        loss, gradient = function(x, weight, labels)
        weight -= np.asarray(RATE, x.dtype) * gradient
        losses.append(float(loss))
    return losses


def print_memory(plot: str) -> None:
    """Print the memory of a call beside arguments and results, and draw it to the file `plot` if one is given.

    What still grows with the number of classes is as large as the weight.
    """
    print(f"\n{'classes':>8} {'logits and gradient':>20} {'fused':>10}")
    numbers = [1000 * 2**k for k in range(8)]
    rows: list[tuple[float, float]] = []
    for classes in numbers:
        shapes = cf.spec((8192, 1024)), cf.spec((classes, 1024)), cf.spec((8192,), "int64")
        plan = cf.fuse(loss_and_gradient).plan(*shapes)
        rows.append((2 * 4 * 8192 * classes / 1e6, plan.workspace / 1e6))
        print(f"{classes:>8} {rows[-1][0]:>17.0f} MB {rows[-1][1]:>7.0f} MB")
    if plot:
        draw_memory(plot, "classes", numbers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", default="", metavar="FILE", help="where to draw memory over classes")
    plot = parser.parse_args().plot

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES))
    labels = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(axis=1)
    fused = cf.fuse(loss_and_gradient, max_workspace=WORKSPACE)
    exact, x32 = train(plain, x, labels), x.astype(np.float32)
    unfused, ours = train(plain, x32, labels), train(fused, x32, labels)

    (plan,) = fused.plans
    print(plan)
    # Blocks of logits, plus the sums over them: weight-sized, float32.
    if plan.blocks is None or plan.workspace > WORKSPACE + 2 * 4 * CLASSES * FEATURES:
        raise SystemExit("the plan holds all logits")
    print()
    compare_losses(unfused, ours, exact)
    print_memory(plot)


if __name__ == "__main__":
    main()
