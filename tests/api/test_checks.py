"""Wrong arguments of the public interface: each error names the argument, what is expected, and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(12, dtype=np.float32).reshape(3, 4)
W = np.ones((5, 4), np.float32)
LABELS = np.array([0, 1, 2])
MEAN, VAR = np.zeros(4, np.float32), np.ones(4, np.float32)


def norm(*arrays: Any, **options: Any) -> Any:
    """Train on a batch, with copies of the running statistics unless others are given."""
    return cf.batch_norm(X, *(arrays or (MEAN.copy(), VAR.copy())), **options)


class Pair:
    def __init__(self, a: Any):
        self.a = a


cf.register(Pair, lambda pair: pair.a, lambda _, children: Pair(children[0]))

# What is called, and the words of the error.
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "precision": (lambda: cf.precision("best"), ValueError, "precision: expected one of 'highest', .*, got 'best'"),
    "spec None": (lambda: cf.spec(3, None), TypeError, "dtype: expected a dtype, got None"),
    "spec name": (lambda: cf.spec(3, "f5"), TypeError, "dtype: .*expected one of float16, .*complex"),
    "strict": (lambda: cf.fuse(cf.relu, strict="no"), TypeError, "strict: expected a bool, got str"),
    "keep_halves": (lambda: cf.fuse(cf.relu, keep_halves=None), TypeError, "keep_halves: expected a bool, got None"),
    "x None": (lambda: cf.softmax(None), TypeError, r"argument 'x': expected an array or numbers, got NoneType"),
    "x str": (lambda: cf.relu("text"), TypeError, r"argument 'x': expected an array or numbers, got str"),
    "x dict": (lambda: cf.mean({"a": X}), TypeError, r"argument 'a': expected an array or numbers, got dict"),
    "x ragged": (lambda: cf.relu([[1.0], [1.0, 2.0]]), ValueError, r"argument 'x': .*inhomogeneous"),
    "ragged fused": (lambda: cf.fuse(lambda x: x + np.array([[1.0], [1.0, 2.0]]))(X), ValueError, "inhomogeneous"),
    "linear ragged": (lambda: cf.linear(X, [[1.0], [1.0, 2.0]]), ValueError, "inhomogeneous shape"),
    "x class": (lambda: cf.relu(np.ndarray), TypeError, r"argument 'x': expected an array or numbers, got type"),
    "x class fused": (lambda: cf.fuse(lambda x, y: x + y)(X, np.ndarray), cf.TraceError, "an operation with a type"),
    "keyword": (lambda: cf.softmax(X, dim=1), TypeError, r"softmax\(\) got an unexpected keyword argument 'dim'"),
    "missing": (lambda: cf.softmax(axis=1), TypeError, r"softmax\(\) missing a required argument: 'x'"),
    "keyword fused": (lambda: cf.fuse(cf.relu)(X, q=1), TypeError, r"relu\(\) got an unexpected keyword argument 'q'"),
    "softmax axis": (lambda: cf.softmax(X, axis=2), np.exceptions.AxisError, "^softmax: axis 2 is out of bounds"),
    "log_softmax axis": (lambda: cf.log_softmax(X, 0.5), TypeError, "^log_softmax: axis 0.5 is not an integer"),
    "softmax complex": (lambda: cf.softmax(X + 1j), cf.TraceError, "softmax of complex64 arrays"),
    "log_softmax complex": (lambda: cf.log_softmax(X + 1j, 1), cf.TraceError, "log_softmax of complex64 arrays"),
    "linear x": (lambda: cf.linear(2.0, W), ValueError, r"x: expected an array of shape .*in_features\), got \(\)"),
    "linear weight": (lambda: cf.linear(X, None), TypeError, "weight: expected an array or a number, got None"),
    "linear bias": (lambda: cf.linear(X, W, [0.0]), ValueError, r"bias: expected shape \(5,\), got \(1,\)"),
    "logsumexp b": (lambda: cf.logsumexp(X, b=X[:2]), ValueError, r"b: expected a shape .*\(3, 4\), got \(2, 4\)"),
    "logsumexp b str": (lambda: cf.logsumexp(X, b="a"), TypeError, "b: expected an array or a number, got 'a'"),
    "slope": (lambda: cf.leaky_relu(X, "a"), TypeError, "negative_slope: expected an array or a number, got 'a'"),
    "beta": (lambda: cf.softplus(X, None), TypeError, "beta: expected an array or a number, got None"),
    "threshold": (lambda: cf.softplus(X, 1.0, 1j), TypeError, "threshold: expected an array or a number, got 1j"),
    "elu alpha": (lambda: cf.elu(X, {}), TypeError, "alpha: expected an array or a number"),
    "celu alpha": (lambda: cf.celu(X, "a"), TypeError, "alpha: expected an array or a number"),
    "celu alpha 0": (lambda: cf.celu(X, 0.0), ValueError, r"alpha: expected a number other than 0, got 0.0; relu"),
    "hardtanh limits": (lambda: cf.hardtanh(X, 2, -1.0), ValueError, r"min_val: expected at most max_val, -1"),
    "hardtanh fused": (lambda: cf.fuse(cf.hardtanh)(X, 2.0, 1.0), ValueError, r"min_val: expected at most max_val"),
    "min_val": (lambda: cf.hardtanh(X, None), TypeError, "min_val: expected an array or a number"),
    "max_val": (lambda: cf.hardtanh(X, 0.0, "a"), TypeError, "max_val: expected an array or a number"),
    "clip min": (lambda: cf.clip(X, "a"), TypeError, "min: expected an array or a number"),
    "clip max": (lambda: cf.clip(X, 0, "a"), TypeError, "max: expected an array or a number"),
    "ddof": (lambda: cf.var(X, ddof="a"), TypeError, "ddof: expected a number, got 'a'"),
    "ddof array": (lambda: cf.std(X, ddof=X), TypeError, "ddof: expected a number, got an array"),
    "kernel_size": (lambda: cf.avg_pool1d(X, 2.0), TypeError, "kernel_size: expected an integer, got 2.0"),
    "mean list": (lambda: norm([0.0] * 4, VAR), ValueError, r"running_mean: expected .*\(4,\), got \[0.0"),
    "var number": (lambda: norm(MEAN, 1.0), ValueError, r"running_var: expected .*\(4,\), got 1.0"),
    "eps": (lambda: norm(eps=None), TypeError, "eps: expected a number, got None"),
    "eps negative": (lambda: norm(eps=-1e-5, training=True), ValueError, "eps: expected a number of at least 0, got -"),
    "eps NaN": (lambda: norm(eps=np.nan), ValueError, "eps: expected a number of at least 0, got nan"),
    "integer statistic": (
        lambda: norm(MEAN.astype(int), VAR.copy(), training=True),
        ValueError,
        "running_mean: expected floats, which training updates, got int64",
    ),
    "batches of columns": (
        lambda: norm(training=True, num_batches_tracked=np.zeros(4, int)),
        ValueError,
        r"num_batches_tracked: expected an array of shape \(\), got \(4,\)",
    ),
    "one statistic": (lambda: norm(MEAN, training=True), ValueError, "running_mean, running_var: give both or neither"),
    "momentum": (lambda: norm(momentum="a", training=True), TypeError, "momentum: expected a number, got 'a'"),
    "batches": (lambda: norm(training=True, num_batches_tracked=3), ValueError, r"num_batches_tracked: .*got 3"),
    "target": (lambda: cf.cross_entropy(X, None), TypeError, "target: expected an array or a number, got None"),
    "target complex": (lambda: cf.mse_loss(X, X + 1j), ValueError, "target: expected real numbers, got complex64"),
    "target str": (lambda: cf.mse_loss(X, "a"), TypeError, "target: expected an array or a number, got 'a'"),
    "class weight": (lambda: cf.nll_loss(X, LABELS, weight=1.0), ValueError, r"weight: .*shape \(4,\), got \(\)"),
    "pos_weight": (
        lambda: cf.fuse(lambda x: cf.binary_cross_entropy_with_logits(x, x, pos_weight="a"))(X),
        TypeError,
        "pos_weight: expected an array or a number, got 'a'",
    ),
    "ignore_index": (
        lambda: cf.cross_entropy(X, LABELS, ignore_index=1.5),
        TypeError,
        "ignore_index: expected an integer, got 1.5",
    ),
    "smoothing": (lambda: cf.cross_entropy(X, LABELS, label_smoothing="a"), TypeError, "label_smoothing: expected a n"),
    "z_loss": (lambda: cf.cross_entropy(X, LABELS, z_loss="a"), TypeError, "z_loss: expected a number"),
    "soft_cap": (lambda: cf.cross_entropy(X, LABELS, soft_cap="a"), TypeError, "soft_cap: expected a number"),
    "temperature": (
        lambda: cf.cross_entropy(X, LABELS, temperature=np.array(2.0)),
        TypeError,
        "temperature: expected a number, got an array",
    ),
    "delta": (lambda: cf.huber_loss(X, X, delta=None), TypeError, "delta: expected a number, got None"),
    "focal alpha": (lambda: cf.sigmoid_focal_loss(X, X, alpha="a"), TypeError, "alpha: expected a number"),
    "focal gamma": (lambda: cf.sigmoid_focal_loss(X, X, gamma=None), TypeError, "gamma: expected a number"),
    "fn": (lambda: cf.fuse(dict), TypeError, "fn: expected a function, but there is no signature"),
    "static": (lambda: cf.fuse(lambda x: x, static=3), TypeError, "static: expected a tuple of names, got 3"),  # type: ignore[arg-type]
    "spec shape": (
        lambda: cf.spec((3, 4.0)),
        TypeError,
        r"shape: expected an integer or a tuple of them, got \(3, 4.0",
    ),
    "spec dtype": (lambda: cf.spec((3, 4), "float7"), TypeError, "dtype: .*float7"),
    "gpu": (lambda: cf.fuse(cf.relu).plan(X).best_time(None), ValueError, "gpu: expected one"),
    "flatten": (lambda: cf.fuse(lambda p: p.a.sum())(Pair(X)), TypeError, r"flatten of a registered Pair: .*ndarray"),
    "states": (
        lambda: cf.partial(lambda x, w: cf.logsumexp(x @ w.T, axis=1), {"w": 0}, 10).combine(3),  # type: ignore[arg-type]
        TypeError,
        "states: expected several states of shards .*, got int",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call()


def test_options_may_be_numbers_of_any_kind() -> None:
    """NumPy's numbers, arrays that broadcast, and numbers computed in a fused function."""
    for slope in (0.5, np.float32(0.5), np.array(0.5, np.float32), np.full(4, 0.5, np.float32), [0.5] * 4):
        np.testing.assert_array_equal(cf.leaky_relu(-X, slope), -X / 2)
    assert cf.var(X, ddof=np.int64(1)) == cf.var(X, ddof=True) == cf.var(X, ddof=1.0)
    fused = cf.fuse(lambda x, y, s: cf.leaky_relu(x, y.mean() * 0 + s) + cf.var(x, ddof=s + 0.5))
    np.testing.assert_allclose(fused(-X, X, 0.5), -X / 2 + X.var(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(
        cf.cross_entropy(
            X, LABELS, ignore_index=np.int8(0), label_smoothing=np.float32(0.5), temperature=np.float64(2)
        ),
        cf.cross_entropy(X[1:], LABELS[1:], label_smoothing=0.5, temperature=2),
        rtol=1e-6,
    )


def test_options_may_be_numbers_that_the_call_computes() -> None:
    x = np.linspace(-2.0, 3.0, 12).reshape(4, 3)
    mean, variance = np.zeros(3), np.ones(3)
    for number in (lambda x: x.max(), lambda x: x.max().item(), lambda x: float(x.max())):
        functions = [
            lambda x, n=number: cf.celu(x, n(x)),
            lambda x, n=number: cf.hardtanh(x, -1.0, n(x) / 2),
            lambda x, n=number: cf.hardtanh(x, -n(x) / 3, n(x) / 2),
            lambda x, n=number: cf.batch_norm(x, mean, variance, eps=n(x)),
        ]
        for function in functions:
            with force_plans():
                np.testing.assert_allclose(cf.fuse(function)(x), function(x), rtol=1e-12)


def test_a_number_is_no_count_of_batches() -> None:
    with pytest.raises(ValueError, match=r"num_batches_tracked: expected an array of shape \(\)"):
        cf.batch_norm(np.ones((3, 2)), np.zeros(2), np.ones(2), training=True, num_batches_tracked=np.int64(3))
