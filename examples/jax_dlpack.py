"""JAX arrays by DLPack: they go in without a copy, and JAX arrays come out.

Call fused functions outside of `jax.jit` and `jax.grad`: they take arrays with data, not JAX's tracers.

    python examples/jax_dlpack.py
"""

from __future__ import annotations

import numpy as np

import cupyfuse as cf


@cf.fuse
def head(x, weight, bias):
    y = x @ weight.T + bias
    return cf.gelu(cf.logsumexp(y, axis=1, keepdims=True)), cf.softmax(y, axis=1)


def main() -> None:
    try:
        import jax
        from jax import numpy as jnp
    except ImportError:
        print("JAX is not installed. `pip install jax`, then run this again.")
        return
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, bias = (jax.random.normal(k, s) for k, s in zip(keys, ((64, 96), (80, 96), (80,)), strict=True))
    weight = weight / 96**0.5
    print("arrays on", x.device)

    found = head(x, weight, bias)
    print("results:", *(f"{type(result).__name__} {result.shape} {result.dtype}" for result in found))

    # JAX's own operations, and NumPy's in float64.
    y = x @ weight.T + bias
    expected = jax.nn.gelu(jax.nn.logsumexp(y, axis=1, keepdims=True), approximate=False), jax.nn.softmax(y, axis=1)
    doubles = [np.asarray(a, np.float64) for a in (x, weight, bias)]
    exact = head.__wrapped__(*doubles)
    # Summing in another order moves y by a few roundings of |x| |weight|ᵀ + |bias|, and the results, whose slopes are
    # at most about one, by as much.
    sizes = [abs(a) for a in doubles]
    roundings = 4 * 2.0**-24 * (sizes[0] @ sizes[1].T + sizes[2]).max()
    for name, ours, theirs, right in zip(("gelu of logsumexp", "softmax"), found, expected, exact, strict=True):
        if not isinstance(ours, jax.Array):
            raise SystemExit(f"{name}: expected a jax.Array, got {type(ours).__name__}")
        errors = [float(abs(np.asarray(result, np.float64) - right).max()) for result in (ours, theirs)]
        print(f"{name}: largest error against float64 {errors[0]:.2g}, of JAX's own {errors[1]:.2g}")
        if not errors[0] <= errors[1] + roundings:
            raise SystemExit(f"{name} is less accurate than JAX's own")

    # The results are ordinary JAX arrays, and single functions take such arrays too.
    logs = cf.log_softmax(jnp.log(found[1]), axis=1)
    print("log_softmax of log(softmax):", type(logs).__name__, bool(jnp.allclose(jnp.exp(logs), found[1], atol=1e-6)))


if __name__ == "__main__":
    main()
