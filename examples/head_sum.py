"""Linear -> sum -> max -> mean -> logsumexp -> logsumexp: a head that needs no matrix product.

The sum of a linear map over its outputs is a product with a vector, the column sums of the weight. The other four
reductions then see one element, and are the identity. With bound weights the column sums are computed once.

    python examples/head_sum.py [--full]
"""

from __future__ import annotations

from common import array_module, check_accuracy, compare_times, in_float64, shape_from_command_line
from cupyfuse.heads import example_inputs, head_sum


def main() -> None:
    xp = array_module()
    drawn = example_inputs(head_sum, *shape_from_command_line(__doc__))
    inputs = {name: xp.asarray(array) for name, array in drawn.items()}
    x = inputs["x"]
    serve = head_sum.bind(weight=inputs["weight"], bias=inputs["bias"])

    print(serve.plan(x))
    print()
    exact = head_sum.__wrapped__(**in_float64(inputs))
    check_accuracy(serve(x), head_sum.__wrapped__(**inputs), exact)
    compare_times(lambda: serve(x), lambda: head_sum.__wrapped__(**inputs), xp)

    # Rows with infinities are evaluated as written.
    x[0, 0] = xp.inf
    fused, unfused = float(serve(x)[0, 0]), float(head_sum.__wrapped__(**inputs)[0, 0])
    print(f"a row with an infinity: {fused} fused, {unfused} unfused")
    if str(fused) != str(unfused):
        raise SystemExit("fused and unfused disagree on a row with an infinity")


if __name__ == "__main__":
    main()
