"""Softmax regression in NumPy: the loss, its gradient written by hand, and both in one plan without the logits.

The plain function computes all logits, and their gradient. Fused, a plan computes them for a block of rows at a time,
adds up the gradient of the weight, and never holds more than `max_workspace`. Both are trained for some steps and
compared with float64; then a table, and a plot where matplotlib is installed, of memory over the number of classes.

    python examples/softmax_regression.py [--plot FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

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
    """The same in NumPy alone."""
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


def table(plot: str) -> None:
    """Print, and plot, what a call takes beside arguments and results; what still grows is as large as the weight."""
    print(f"\n{'classes':>8} {'logits and gradient':>20} {'fused':>10}")
    numbers = [1000 * 2**k for k in range(8)]
    rows: list[tuple[float, float]] = []
    for classes in numbers:
        shapes = cf.spec((8192, 1024)), cf.spec((classes, 1024)), cf.spec((8192,), "int64")
        plan = cf.fuse(loss_and_gradient).plan(*shapes)
        rows.append((2 * 4 * 8192 * classes / 1e6, plan.workspace / 1e6))
        print(f"{classes:>8} {rows[-1][0]:>17.0f} MB {rows[-1][1]:>7.0f} MB")
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    if plot:
        pyplot.loglog(numbers, rows, label=("logits and their gradient", "fused"), marker="o")
        pyplot.xlabel("classes")
        pyplot.ylabel("MB beside arguments and results")
        pyplot.legend()
        pyplot.savefig(plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", default="", metavar="FILE", help="where to draw memory over classes")
    plot = parser.parse_args().plot

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES))
    labels = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(axis=1)
    fused = cf.fuse(loss_and_gradient, max_workspace=WORKSPACE)
    narrow = x.astype(np.float32)
    exact, unfused, ours = train(plain, x, labels), train(plain, narrow, labels), train(fused, narrow, labels)

    (plan,) = fused.plans
    print(plan)
    if plan.blocks is None or plan.workspace > WORKSPACE + 2 * 4 * CLASSES * FEATURES:
        raise SystemExit("the plan holds all logits")
    print(f"\n{'step':>5} {'plain':>11} {'fused':>11} {'float64':>11}")
    for step in (0, STEPS // 2, STEPS - 1):
        print(f"{step:>5} {unfused[step]:>11.7f} {ours[step]:>11.7f} {exact[step]:>11.7f}")
    # The roundings of both add up in ways of their own; a loss is itself rounded.
    distances = [max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (unfused, ours)]
    print(f"largest distance from float64: {distances[0]:.2g} plain, {distances[1]:.2g} fused")
    if not distances[1] <= 4 * distances[0] + 8 * np.finfo(np.float32).eps * max(exact):
        raise SystemExit("the fused training is further from float64 than roundings explain")
    if not exact[-1] < 0.8 * exact[0]:
        raise SystemExit("nothing was learnt")
    table(plot)


if __name__ == "__main__":
    main()
