"""Linear -> logsumexp -> LeakyReLU twice -> GELU twice: one read of the matrix product's result.

Unfused, bias, logsumexp and each activation are separate launches. Fused they are one: it adds the bias as it reads a
row, computes maximum and sum in one pass, and applies the activations to the row's result.

    python examples/head_logsumexp.py [--full]
"""

from __future__ import annotations

from common import array_module, check_accuracy, compare_times, in_float64, shape_from_command_line
from cupyfuse.heads import example_inputs, head_logsumexp


def main() -> None:
    xp = array_module()
    drawn = example_inputs(head_logsumexp, *shape_from_command_line(__doc__))
    inputs = {name: xp.asarray(array) for name, array in drawn.items()}

    print(head_logsumexp.plan(**inputs))
    print()
    fused = head_logsumexp(**inputs)
    unfused = head_logsumexp.__wrapped__(**inputs)
    check_accuracy(fused, unfused, head_logsumexp.__wrapped__(**in_float64(inputs)))
    compare_times(lambda: head_logsumexp(**inputs), lambda: head_logsumexp.__wrapped__(**inputs), xp)


if __name__ == "__main__":
    main()
