"""Arrays of other libraries: in by DLPack without a copy, out as their own library's type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import normal

import cupyfuse as cf


class Minimal:
    """The least an array library can offer: DLPack, and a namespace that takes it back."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __array_namespace__(self, **_: Any) -> Any:
        return MinimalNamespace


class MinimalNamespace:
    @staticmethod
    def from_dlpack(value: Any) -> Minimal:
        return Minimal(np.from_dlpack(value))


class Homeless(Minimal):
    """Without a namespace, from a module without `from_dlpack`."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__array_namespace__":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 3), (3,), (), (0, 3), (1, 1)])
def test_torch_tensors_come_back_as_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    result = cf.fuse(lambda x: x * 2)(x)
    assert type(result) is torch.Tensor and result.dtype == dtype and result.shape == shape
    assert torch.equal(result, x * 2)


def test_every_result_is_given_back() -> None:
    x = torch.randn(4, 3)
    results = cf.fuse(lambda x: {"sum": x.sum(), "mask": x > 0, "count": (x > 0).sum(axis=1), "transposed": (x + 1).T})(
        x
    )
    assert all(type(r) is torch.Tensor for r in results.values())
    assert results["sum"].shape == () and results["sum"].item() == pytest.approx(x.sum().item(), abs=1e-5)
    assert results["mask"].dtype == torch.bool and torch.equal(results["mask"], x > 0)
    assert results["count"].dtype == torch.int64
    assert torch.equal(results["transposed"], (x + 1).T)


@pytest.mark.parametrize(
    "view", [lambda t: t.T, lambda t: t[::2], lambda t: t[:, 1:4], lambda t: t[:, ::3], lambda t: t[1:, 2:].T]
)
def test_views_of_tensors(view: Any) -> None:
    x = torch.randn(6, 8)
    assert torch.allclose(cf.fuse(lambda x: cf.softmax(x, axis=1))(view(x)), torch.softmax(view(x), 1), atol=1e-6)


def test_tensors_come_in_without_a_copy() -> None:
    """An in-place change reaches the tensor itself, and so does `out=`."""

    def add_one(x: Any) -> Any:
        x += 1
        return x * 2

    x, out = torch.zeros(3), torch.empty(3)
    assert cf.fuse(add_one)(x, out=out) is out
    assert x.tolist() == [1, 1, 1] and out.tolist() == [2, 2, 2]


def test_the_first_array_decides_on_the_results() -> None:
    tensor, array = torch.ones(3), np.ones(3, np.float32)
    both = cf.fuse(lambda a, b: a + b)
    assert type(both(tensor, array)) is torch.Tensor and type(both(array, tensor)) is np.ndarray


def test_public_functions_take_tensors() -> None:
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(cf.logsumexp(x, axis=1), torch.logsumexp(x, 1))
    assert torch.allclose(cf.linear(x, w), x @ w.T)
    assert torch.allclose(cf.gelu(x), torch.nn.functional.gelu(x))
    assert type(cf.sum(x)) is torch.Tensor
    layer = torch.nn.BatchNorm1d(4).double().train()
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    counter = torch.tensor(0)
    result = cf.batch_norm(x, mean, var, training=True, num_batches_tracked=counter)
    assert torch.allclose(result, layer(x)) and counter.item() == 1
    assert torch.allclose(mean, layer.running_mean) and torch.allclose(var, layer.running_var)


def test_bound_tensors() -> None:
    x, w = torch.randn(5, 4), torch.randn(3, 4)
    serve = cf.fuse(lambda x, w: (x @ w.T).sum(axis=1)).bind(w=w)
    assert torch.allclose(serve(x), (x @ w.T).sum(1), atol=1e-5)
    w *= 2
    serve.refresh()
    assert torch.allclose(serve(x), (x @ w.T).sum(1), atol=1e-5)


def test_plans_of_tensors() -> None:
    assert cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(torch.ones(4, 3)).launches == 1


def test_a_minimal_array(rng: np.random.Generator) -> None:
    x = normal(rng, (4, 3))
    result = cf.fuse(lambda x: (x * 2, x.sum(axis=1)))(Minimal(x))
    assert all(type(r) is Minimal for r in result)
    np.testing.assert_array_equal(result[0].array, x * 2)
    np.testing.assert_allclose(result[1].array, x.sum(axis=1), rtol=1e-6)


def test_a_tensor_of_three_dimensions(rng: np.random.Generator) -> None:
    x = torch.from_numpy(normal(rng, (2, 3, 4)))
    moved, total = cf.fuse(lambda x: (np.swapaxes(x, 0, 2) * 2, x.sum((0, 1))))(x)
    torch.testing.assert_close(moved, x.swapaxes(0, 2) * 2)
    torch.testing.assert_close(total, x.sum((0, 1)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3, requires_grad=True), r"'x'.*torch.*detach"),
        (torch.ones(3, dtype=torch.bfloat16), r"'x'.*DLPack"),
        (torch.ones(3, dtype=torch.complex64).conj(), r"'x'.*resolve_conj"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, r"'x'.*negates.*resolve_neg"),
        (torch.eye(3).to_sparse(), r"'x'"),
        (torch.ones(3, device="meta"), r"'x'"),
        (Minimal(np.ones(3), (4, 0)), r"'x'.*device type 4"),
        (Homeless(np.ones(3)), r"'x'.*from_dlpack"),
    ],
    ids=["gradient", "bfloat16", "conjugate", "negated", "sparse", "meta", "another device", "no way back"],
)
def test_arrays_that_cannot_come_in(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cf.fuse(lambda x: x + 1)(value)


def test_nothing_is_written_to_a_negated_tensor() -> None:
    out = torch.ones(3, dtype=torch.complex64).conj().imag
    with pytest.raises(TypeError, match=r"'out'.*resolve_neg"):
        cf.relu(torch.ones(3), out=out)
    assert torch.equal(out, torch.zeros(3))


def test_integers_and_complex_numbers_of_other_libraries() -> None:
    integers = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert torch.equal(cf.fuse(lambda x: x * 2)(integers), integers * 2)
    numbers = torch.ones(3, dtype=torch.complex64) * 1j
    assert torch.equal(cf.fuse(lambda x: x * 2)(numbers), numbers * 2)


def test_read_only_arrays_can_be_read_and_not_changed() -> None:
    def change(x: Any) -> Any:
        x += 1
        return x

    frozen = np.ones(3)
    frozen.flags.writeable = False
    result = cf.fuse(lambda x: x * 2)(Minimal(frozen))
    np.testing.assert_array_equal(result.array, np.full(3, 2.0))
    with pytest.raises(ValueError, match=r"'x'.*read-only"):
        cf.fuse(change)(Minimal(frozen))
