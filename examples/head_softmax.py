"""Linear -> BatchNorm -> scale -> softmax, in inference and in training.

In inference bias, normalisation and scale are part of the softmax's launch, the deviation and gamma one factor. In
training one pass over the product computes the batch's statistics, and the running statistics are updated in place.

    python examples/head_softmax.py [--full]
"""

from __future__ import annotations

from typing import Any

from common import array_module, check_accuracy, compare_times, in_float64, shape_from_command_line
from cupyfuse.heads import example_inputs, head_softmax


def infer(inputs: dict[str, Any], xp: Any) -> None:
    """Normalise with the running statistics, everything but x bound."""
    x = inputs["x"]
    serve = head_softmax.bind(**{name: array for name, array in inputs.items() if name != "x"})
    print(serve.plan(x))
    print()
    check_accuracy(serve(x), head_softmax.__wrapped__(**inputs), head_softmax.__wrapped__(**in_float64(inputs)))
    compare_times(lambda: serve(x), lambda: head_softmax.__wrapped__(**inputs), xp)


def train(inputs: dict[str, Any], xp: Any) -> None:
    """Show the plan of training, which normalises by the batch; check results and running statistics; compare times."""
    print(head_softmax.plan(**inputs, training=True))
    print()
    # Each of the three runs updates its own running statistics.
    exact, unfused = in_float64(inputs), {name: array.copy() for name, array in inputs.items()}
    check_accuracy(
        head_softmax(**inputs, training=True),
        head_softmax.__wrapped__(**unfused, training=True),
        head_softmax.__wrapped__(**exact, training=True),
    )
    for name in ("running_mean", "running_var"):
        print(f"{name} after the batch: ", end="")
        check_accuracy(inputs[name], unfused[name], exact[name])
    compare_times(
        lambda: head_softmax(**inputs, training=True), lambda: head_softmax.__wrapped__(**unfused, training=True), xp
    )


def main() -> None:
    xp = array_module()
    drawn = example_inputs(head_softmax, *shape_from_command_line(__doc__))
    inputs = {name: xp.asarray(array) for name, array in drawn.items()}
    print("inference\n=========")
    infer(inputs, xp)
    print("\ntraining\n========")
    train(inputs, xp)


if __name__ == "__main__":
    main()
