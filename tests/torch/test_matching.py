"""Inputs that a runner recognises without a key: like those of a call before, and no others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cupyfuse.torch as ct
from cupyfuse.torch.chains.matching import matcher
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.chains.runner import _MOST_RECOGNIZED, Runner
from cupyfuse.torch.functions import Step, build_chain
from cupyfuse.torch.rules.symbols import Ref

SHAPE = (4, 6)


def tensor(shape: tuple[int, ...] = SHAPE, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, **options)


class Wrapped(torch.Tensor):
    """A subclass, which PyTorch may treat otherwise."""


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another shape": lambda: tensor((4, 7)),
    "another rank": lambda: tensor((1, 4, 6)),
    "columns apart": lambda: tensor((4, 12))[:, ::2],
    "transposed": lambda: tensor((6, 4)).t(),
    "another dtype": lambda: tensor().double(),
    "gradients": lambda: tensor(requires_grad=True),
    "a subclass": lambda: tensor().as_subclass(Wrapped),
    "sparse": lambda: tensor().to_sparse(),
    "to be negated": lambda: torch.complex(tensor(), tensor()).conj().imag,
    "on another device": lambda: tensor(device="meta"),
    "nested": lambda: torch.nested.nested_tensor([*tensor()]),
    "jagged": lambda: torch.nested.nested_tensor([*tensor()], layout=torch.jagged),
    "of oneDNN": lambda: tensor().to_mkldnn(),
    "compressed": lambda: tensor().to_sparse_csr(),
    "zeros without memory": lambda: torch._efficientzerotensor(SHAPE),
}
NOT_STRIDED = ("sparse", "nested", "jagged", "of oneDNN", "compressed")


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda t: t,
    "parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "buffer": nn.Buffer,
}


def runner_of(*steps: Step) -> Runner:
    return Runner(build_chain(steps or (Step("softmax", (1,)),), ("input",)))


@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_are_not_recognised(name: str) -> None:
    matches = matcher([tensor()], [0], None)
    assert matches([tensor()]) and matches([tensor().clone()])
    other = OTHERS[name]()
    assert not matches([other])
    if name not in (*NOT_STRIDED, "a subclass"):
        again = matcher([other], [0], None)
        assert again([OTHERS[name]()]) and not again([tensor()])


@pytest.mark.parametrize("after", PLAIN)
@pytest.mark.parametrize("before", PLAIN)
def test_parameters_and_tensors_are_recognised_in_turns(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights that `torch.func.functional_call` replaces: their executor is looked up once."""
    steps = (Step("tanh", ()), Step("add", (Ref(1),)))
    runner = Runner(build_chain(steps, ("input", "weight"), fixed=frozenset({1})))
    x, searches, search = tensor(), [], runner._executor_for
    monkeypatch.setattr(runner, "_executor_for", lambda tensors: searches.append(1) or search(tensors))
    counts = []
    for _ in range(3):
        for kind in (before, after):
            weight = PLAIN[kind](tensor() * 2)
            for _ in range(3):
                torch.testing.assert_close(runner((x, weight))[0], torch.tanh(x) + weight, check_stride=True)
        counts.append(len(searches))
    assert counts[0] == counts[2]
    assert len(runner._recognized) == len({type(PLAIN[kind](x)) for kind in (before, after)})


def test_the_same_tensor_twice_is_recognised() -> None:
    x, y = tensor(), tensor() + 1
    matches = matcher([x, y, x], range(3))
    assert matches([x, y, x]) and matches([y, x, y]) and not matches([x, y, x.clone()])
    assert not matcher([x, y, x.clone()], range(3))([x, y, x]), "the guards take none twice"


class Strict(torch.Tensor):
    """A subclass of few operations, which does not tell its layout."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.layout.__get__:
            raise NotImplementedError(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("other", [2.0, tensor().as_subclass(Strict)], ids=["a number", "a subclass"])
def test_what_does_not_tell_its_layout_is_left_to_pytorch(other: Any) -> None:
    """After calls with tensors, as a module's parameter that was deleted for a number of that name."""
    runner = Runner(build_chain((Step("tanh"), Step("mul", (Ref(1),))), ("input", "weight"), fixed=frozenset({1})))
    x, plain = tensor(), tensor() + 1
    for _ in range(3):
        torch.testing.assert_close(runner((x, plain))[0], torch.tanh(x) * plain)
        torch.testing.assert_close(runner((x, other))[0], torch.tanh(x) * other)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("other", [torch.no_grad, default_dtype])
def test_other_modes_are_not_recognised(other: Callable[[], Any]) -> None:
    inputs = [tensor()]
    matches = matcher(inputs, [0], None)
    with other():
        assert not matches(inputs)
    assert matches(inputs)


def test_only_the_numbers_given_are_compared() -> None:
    matches = matcher([tensor(), tensor(), tensor()], [0, 2], None)
    assert matches([tensor(), tensor((9, 9)), tensor()])
    assert not matches([tensor(), tensor(), tensor((9, 9))])


def test_the_precision_belongs_to_products_alone() -> None:
    torch.manual_seed(0)
    layer, x = ct.LinearSoftmax(6, 5).requires_grad_(False), tensor()
    for _ in range(3):
        layer(x)
    ct.softmax(x, 1)
    with_products = [r for r in layer._runners().runners if r._recognized]
    assert [e.has_products for r in with_products for _, e in r._recognized] == [True]
    matches, executor = with_products[0]._recognized[0]
    inputs = (x, layer.weight, layer.bias)
    assert matches(inputs) and executor.is_current(inputs)
    torch.set_float32_matmul_precision("high")
    try:
        assert not matches(inputs)
        runner = runner_of()
        for _ in range(3):
            runner((x,))
        ((matches, executor),) = runner._recognized
        assert not executor.has_products
    finally:
        torch.set_float32_matmul_precision("highest")
    assert matches((x,))


def test_calls_of_all_kinds_in_turn_are_right() -> None:
    """More kinds than are recognised, each several times, in one runner."""
    runner = runner_of()
    kinds = [name for name in OTHERS if name not in ("another rank", *NOT_STRIDED, "on another device")]
    inputs = [tensor(), *(OTHERS[name]() for name in kinds), tensor((2, 6)), tensor((3, 6))]
    for _ in range(3):
        for x in inputs:
            got, want = runner((x,))[0], torch.softmax(x, 1)
            torch.testing.assert_close(got.detach(), want.detach())
            assert got.requires_grad == want.requires_grad and type(got) is type(want)
    assert len(runner._recognized) == _MOST_RECOGNIZED


@pytest.mark.parametrize("name", [*NOT_STRIDED, "zeros without memory"])
def test_inputs_that_are_no_strided_memory_are_left_to_pytorch(name: str) -> None:
    """After calls with plain tensors of the same shape, and before further ones."""
    runner = runner_of(Step("tanh", ()))
    for _ in range(3):
        runner((tensor(),))
        got, want = runner((OTHERS[name](),))[0], torch.tanh(OTHERS[name]())
        assert (got.layout, got.is_nested) == (want.layout, want.is_nested)
    assert len(runner._recognized) == 1 and sum(runner.refusals.values()) == 3


@pytest.mark.parametrize(
    "name", [name for name in OTHERS if name in ("sparse",) or name not in (*NOT_STRIDED, "on another device")]
)
def test_weights_that_others_replace_are_compared(name: str) -> None:
    """Of a chain that prepacks nothing of its weights, and so keeps none to compare others with."""
    other = OTHERS[name]()
    step = Step("add", (Ref(1),))
    runner = Runner(build_chain((Step("tanh", ()), step), ("input", "weight"), fixed=frozenset({1})))
    x = tensor(other.shape)
    for _ in range(3):
        runner((tensor(), tensor()))
        got, want = runner((x, other))[0], torch.tanh(x) + other
        assert type(got) is type(want) and got.requires_grad == want.requires_grad
        torch.testing.assert_close(got.detach(), want.detach())


def test_intercepted_calls_are_left_to_pytorch() -> None:
    runner, x = runner_of(), tensor()
    for _ in range(3):
        runner((x,))
    assert runner._recognized
    got = torch.func.vmap(lambda row: runner((row[None],))[0][0])(x)
    torch.testing.assert_close(got, torch.softmax(x, 1))
    assert "a transform or a mode of PyTorch's is active" in runner.refusals


def test_changed_weights_are_seen() -> None:
    torch.manual_seed(0)
    layer, x = ct.LinearSoftmax(6, 5).requires_grad_(False), tensor()
    for change in (lambda w: w.mul_(2), lambda w: setattr(w, "data", w.data * 3), lambda w: w.data.add_(1)):
        for _ in range(3):
            torch.testing.assert_close(layer(x), torch.softmax(nn.functional.linear(x, layer.weight, layer.bias), -1))
        change(layer.weight)
    torch.testing.assert_close(layer(x), torch.softmax(nn.functional.linear(x, layer.weight, layer.bias), -1))


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_functions_know_the_calls_they_had(function: str) -> None:
    """Dimensions and ranks alike in value, dtypes and errors, whatever came before."""
    ours, theirs = getattr(ct, function), getattr(torch, function)
    for _ in range(3):
        for shape in ((5,), (4, 6), (2, 3, 4)):
            x = tensor(shape)
            for dim in range(-len(shape), len(shape)):
                torch.testing.assert_close(ours(x, dim), theirs(x, dim))
                torch.testing.assert_close(ours(x, dim, torch.float64), theirs(x, dim, torch.float64))
        x = tensor()
        for wrong in (True, 1.0, "1", (1,), None):
            with pytest.raises(TypeError):
                ours(x, wrong)
        with pytest.raises(IndexError):
            ours(x, 2)
        with pytest.raises(TypeError, match="input: expected"):
            ours([1.0], 0)


def test_kept_dimensions_are_told_apart() -> None:
    x = tensor()
    for _ in range(3):
        for dim in (0, 1, -1, (0, 1)):
            for keepdim in (False, True):
                torch.testing.assert_close(ct.logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim))
        for wrong in (1, None):
            with pytest.raises(TypeError, match="keepdim"):
                ct.logsumexp(x, 1, wrong)  # type: ignore[arg-type]


def test_autocast_is_left_to_pytorch() -> None:
    x = tensor(dtype=torch.bfloat16)
    for _ in range(3):
        ct.softmax(x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert ct.softmax(x, 1).dtype == torch.softmax(x, 1).dtype


def test_threads_at_once_are_recognised() -> None:
    runner = Runner(build_chain((Step("softmax", (1,)),), ("input",)), Options())
    wrong: list[Any] = []

    def work(rows: int) -> None:
        x = tensor((rows, 6))
        want = torch.softmax(x, 1)
        for _ in range(100):
            if not torch.allclose(runner((x,))[0], want):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_precision_of_its_own_is_not_asked_again() -> None:
    steps = (Step("linear", (Ref(1),)), Step("softmax", (-1,)))
    chain = build_chain(steps, ("input", "weight"))
    inputs = (tensor(), tensor((5, 6)))
    for options, depends in ((Options(precision="high"), False), (Options(), True)):
        runner = Runner(chain, options)
        for _ in range(3):
            runner(inputs)
        ((matches, executor),) = runner._recognized
        torch.set_float32_matmul_precision("high")
        try:
            assert executor.has_products and matches(inputs) != depends
        finally:
            torch.set_float32_matmul_precision("highest")


def test_inputs_beside_changed_weights_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: only a weight in other memory is another one to find an executor for."""
    steps = (Step("linear", (Ref(1),)), Step("sum", (1,)))
    runner = Runner(build_chain(steps, ("input", "weight"), frozenset([1])), Options(frozen=True))
    searches = []
    search = runner._find_or_compile
    monkeypatch.setattr(runner, "_find_or_compile", lambda *given: searches.append(1) or search(*given))
    x, weight = tensor(), nn.Parameter(tensor((5, 6)))
    for step in range(5):
        torch.testing.assert_close(runner((x, weight))[0], (x @ weight.t()).sum(1))
        assert len(searches) == 1
        with torch.no_grad():
            weight.add_(step)
    weight.data = weight.data * 2
    torch.testing.assert_close(runner((x, weight))[0], (x @ weight.t()).sum(1))
    assert len(searches) == 2
