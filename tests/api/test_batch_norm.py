"""`batch_norm` against `torch.nn.BatchNorm1d`: inference, training, running statistics, momentum, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import Engine, assert_close, assert_equal, normal, unit

import cupyfuse as cf

Arrays = dict[str, Any]


def state(rng: np.random.Generator, columns: int, dtype: str = "float64") -> Arrays:
    """Arguments of `batch_norm` besides x, as a layer in training holds them."""
    return {
        "running_mean": normal(rng, columns, dtype),
        "running_var": (rng.random(columns) + 0.5).astype(dtype),
        "weight": normal(rng, columns, dtype),
        "bias": normal(rng, columns, dtype),
        "num_batches_tracked": np.array(3, np.int64),
    }


def module(arrays: Arrays, momentum: float | None = 0.1, eps: float = 1e-5) -> torch.nn.BatchNorm1d:
    """The layer of the same state, in float64."""
    layer = torch.nn.BatchNorm1d(len(arrays["weight"]), eps=eps, momentum=momentum).double()
    with torch.no_grad():
        for name, value in arrays.items():
            getattr(layer, name).copy_(torch.from_numpy(np.asarray(value)))
    return layer


def close(actual: Any, expected: Any, dtype: str = "float64", scale: float = 1.0) -> None:
    """To the rounding of some fifty operations on numbers of ordinary size."""
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    assert_close(actual, expected, 128 * unit(dtype) * (1 + np.abs(expected)) * scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("missing", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_inference(engine: Engine, missing: tuple[str, ...], dtype: str, rng: np.random.Generator) -> None:
    x, arrays = normal(rng, (9, 5), dtype), state(rng, 5, dtype)
    wide = {k: v.astype(np.float64) if k != "num_batches_tracked" else v for k, v in arrays.items()}
    for name in missing:
        wide[name] = np.full(5, 1.0 if name == "weight" else 0.0)
    expected = module(wide, eps=1e-3).eval()(torch.from_numpy(x.astype(np.float64)))
    given = {k: engine.array(v) for k, v in arrays.items() if k not in missing}
    close(engine.host(cf.batch_norm(engine.array(x), eps=1e-3, **given)), expected, dtype)
    for name, value in given.items():
        assert_equal(engine.host(value), arrays[name])


@pytest.mark.parametrize("rows", [2, 3, 9, 300])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 0.75, None])
def test_training(engine: Engine, momentum: float | None, rows: int, rng: np.random.Generator) -> None:
    """Three batches in a row: results, running statistics and the counter follow torch's."""
    arrays = state(rng, 5)
    layer = module(arrays, momentum).train()
    given = {k: engine.array(v) for k, v in arrays.items()}
    for _ in range(3):
        x = normal(rng, (rows, 5), "float64") * 3 + 1
        expected = layer(torch.from_numpy(x))
        actual = cf.batch_norm(engine.array(x), training=True, momentum=momentum, **given)
        close(engine.host(actual), expected, scale=10)
    for name in ("running_mean", "running_var"):
        close(engine.host(given[name]), getattr(layer, name))
    assert int(given["num_batches_tracked"]) == int(layer.num_batches_tracked) == 6
    for name in ("weight", "bias"):
        assert_equal(engine.host(given[name]), arrays[name])


def test_training_inside_a_fused_function(engine: Engine, rng: np.random.Generator) -> None:
    """The same through `fuse` and `bind`: the bound statistics follow every call."""
    arrays, x, w = state(rng, 5), normal(rng, (8, 3), "float64"), normal(rng, (5, 3), "float64")
    layer = module(arrays).train()
    given = {k: engine.array(v) for k, v in arrays.items()}

    @cf.fuse
    def step(x: Any, w: Any, norm: Any) -> Any:
        return cf.relu(cf.batch_norm(x @ w.T, training=True, **norm))

    serve = step.bind(w=engine.array(w), norm=given)
    for _ in range(3):
        expected = torch.relu(layer(torch.from_numpy(x @ w.T)))
        close(engine.host(serve(engine.array(x))), expected, scale=10)
        x = x + 1
    close(engine.host(given["running_mean"]), layer.running_mean, scale=10)
    close(engine.host(given["running_var"]), layer.running_var, scale=10)
    assert int(given["num_batches_tracked"]) == 6


def test_without_running_statistics(engine: Engine, rng: np.random.Generator) -> None:
    """Batch statistics serve whether training or not, as with `track_running_stats=False`."""
    x = normal(rng, (9, 5), "float64")
    expected = torch.nn.functional.batch_norm(torch.from_numpy(x), None, None, training=True)
    for training in (False, True):
        close(engine.host(cf.batch_norm(engine.array(x), training=training)), expected, scale=10)
    close(engine.host(cf.batch_norm(engine.array(x), training=True, momentum=None)), expected, scale=10)


def test_the_counter_counts_even_with_a_fixed_momentum(rng: np.random.Generator) -> None:
    arrays = state(rng, 4)
    cf.batch_norm(normal(rng, (3, 4), "float64"), training=True, **arrays)
    assert arrays["num_batches_tracked"] == 4
    cf.batch_norm(normal(rng, (3, 4), "float64"), training=False, **arrays)
    assert arrays["num_batches_tracked"] == 4


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_16_bit_activations_with_float32_statistics(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """Statistics keep their own dtype; the result has the promoted one, as NumPy has it."""
    x, arrays = normal(rng, (64, 5), dtype), state(rng, 5, "float32")
    given = {k: engine.array(v) for k, v in arrays.items()}
    result = cf.batch_norm(engine.array(x), training=True, **given)
    assert result.dtype == np.float32 and given["running_mean"].dtype == np.float32
    layer = module({k: v.astype(np.float64) if v.ndim else v for k, v in arrays.items()}).train()
    close(engine.host(result), layer(torch.from_numpy(x.astype(np.float64))), "float32", 10)
    close(engine.host(given["running_var"]), layer.running_var, "float32", 10)


@pytest.mark.parametrize("columns", [1, 5])
def test_one_row_cannot_be_normalised_in_training(columns: int, rng: np.random.Generator) -> None:
    arrays = state(rng, columns)
    before = {k: v.copy() for k, v in arrays.items()}
    with pytest.raises(ValueError, match="more than 1"):
        cf.batch_norm(np.ones((1, columns)), training=True, **arrays)
    with pytest.raises(ValueError, match="more than 1"):
        cf.batch_norm(np.ones((1, columns)))
    for name, value in arrays.items():
        assert_equal(value, before[name])
    assert cf.batch_norm(np.ones((1, columns)), **arrays).shape == (1, columns)


def test_no_rows(engine: Engine, rng: np.random.Generator) -> None:
    """An empty batch gives an empty result, and leaves the running statistics as they are, as torch does."""
    for training in (False, True):
        arrays = state(rng, 4)
        given = {k: engine.array(v) for k, v in arrays.items()}
        assert cf.batch_norm(engine.array(np.ones((0, 4))), training=training, **given).shape == (0, 4)
        for name in ("running_mean", "running_var"):
            assert_equal(engine.host(given[name]), arrays[name])


def test_large_means_do_not_drown_the_variance(engine: Engine, rng: np.random.Generator) -> None:
    """Columns around 1e4 with spread 1: float32 keeps three digits of x - mean, and the variance must keep them."""
    x = (normal(rng, (4096, 6), "float64") + 1e4).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-5)
    actual = engine.host(cf.batch_norm(engine.array(x), training=True))
    eager = (x - x.mean(0)) / np.sqrt(x.var(0) + np.float32(1e-5))
    assert np.abs(actual - expected).max() <= 2 * np.abs(eager - expected).max() + 8 * unit("float32")


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        ((5,), {}, r"x: .*\(rows, columns\)"),
        ((5, 4, 3), {}, r"3 dimensions|\(rows, columns\)"),
        ((5, 4), {"running_mean": np.ones(3), "running_var": np.ones(4)}, r"running_mean: expected shape \(4,\)"),
        ((5, 4), {"running_mean": np.ones(4), "running_var": np.ones((1, 4))}, r"running_var: expected shape \(4,\)"),
        ((5, 4), {"weight": np.ones(5)}, r"weight: expected shape \(4,\)"),
        ((5, 4), {"bias": np.ones(())}, r"bias: expected shape \(4,\)"),
        ((5, 4), {"running_mean": np.ones(4)}, "running_mean, running_var: give both"),
        (
            (5, 4),
            {"running_mean": np.ones(4), "running_var": np.ones(4), "training": True, "momentum": None},
            "num_batches_tracked",
        ),
    ],
)
def test_arguments_are_checked(x: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, cf.TraceError), match=words):
        cf.batch_norm(np.ones(x), **options)


def test_read_only_statistics_are_an_error_before_anything_changes(rng: np.random.Generator) -> None:
    arrays = state(rng, 4)
    arrays["running_var"].flags.writeable = False
    before = {k: v.copy() for k, v in arrays.items()}
    with pytest.raises(ValueError, match="running_var"):
        cf.batch_norm(np.ones((3, 4)), training=True, **arrays)
    for name, value in arrays.items():
        assert_equal(value, before[name])
