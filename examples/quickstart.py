"""The first steps: fuse a function, look at its plan, bind its weights.

python examples/quickstart.py
"""

from __future__ import annotations

from common import array_module, check_accuracy

import cupyfuse as cf


@cf.fuse
def head(x, weight, bias):
    y = cf.linear(x, weight, bias)
    s = cf.logsumexp(y, axis=1, keepdims=True)
    return cf.gelu(cf.leaky_relu(s))


def main() -> None:
    xp = array_module()
    xp.random.seed(0)
    x = xp.random.rand(64, 512).astype("float32")
    weight = xp.random.rand(1000, 512).astype("float32")
    bias = xp.random.rand(1000).astype("float32")

    # Called as before: NumPy in, NumPy out; CuPy in, CuPy out.
    out = head(x, weight, bias)
    print(type(out), out.shape, out.dtype)

    # The plain function is the reference.
    exact = head.__wrapped__(*(a.astype("float64") for a in (x, weight, bias)))
    check_accuracy(out, head.__wrapped__(x, weight, bias), exact)

    # A plan says what will run: here from shapes alone, without arrays or a GPU.
    print(head.plan(cf.spec((1024, 8192)), cf.spec((8192, 8192)), cf.spec(8192)))

    # With bound weights, what depends on them alone is computed once. The result can go to an array of yours.
    serve = head.bind(weight=weight, bias=bias)
    buffer = xp.empty((64, 1), "float32")
    serve(x, out=buffer)
    print("bound, into a buffer:", buffer[:3, 0])

    # After changing bound weights, refresh.
    weight *= 0.5
    serve.refresh()
    print("with half the weights:", serve(x)[:3, 0])


if __name__ == "__main__":
    main()
