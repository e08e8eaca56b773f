"""Which operations draw random numbers: against what they do to PyTorch's generator."""

from __future__ import annotations

import inspect
import math
import operator
import types
from typing import Any

import pytest
import torch
from torch_rules import call_of, draw

from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.random import _FUNCTIONAL, draws
from cupyfuse.torch.rules.table import OVERLOADS

F = torch.nn.functional
T = torch.Tensor
X, X3 = draw(4, 6), draw(2, 3, 6)


def changes_the_generator(target: Any, args: Any, kwargs: Any) -> bool:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    (getattr(T, target) if isinstance(target, str) else target)(*args, **kwargs)
    return not torch.equal(before, torch.get_rng_state())


def called(target: Any) -> str:
    return str(getattr(target, "__name__", target))


CALLS: list[tuple[Any, Any, Any]] = [
    (torch.rand, (3,), {}),
    (torch.randn, (3,), {}),
    (torch.randint, (5, (3,)), {}),
    (torch.randperm, (7,), {}),
    (torch.rand_like, (X,), {}),
    (torch.randn_like, (X,), {}),
    (torch.randint_like, (X, 5), {}),
    (torch.normal, (0.0, 1.0, (3,)), {}),
    (torch.bernoulli, (X.sigmoid(),), {}),
    (torch.multinomial, (X.exp(), 2), {}),
    (torch.poisson, (X.exp(),), {}),
    (torch.binomial, (X.exp().round(), X.sigmoid()), {}),
    ("random_", (X,), {}),
    ("normal_", (X,), {}),
    ("uniform_", (X,), {}),
    ("exponential_", (X,), {}),
    ("geometric_", (X, 0.5), {}),
    ("cauchy_", (X,), {}),
    ("log_normal_", (X,), {}),
    ("bernoulli_", (X,), {}),
    (T.normal_, (X,), {}),
    (torch.ops.aten.rand_like, (X,), {}),
    (torch.ops.aten.rand_like.default, (X,), {}),
    (torch.ops.aten.sin.default, (X,), {}),
    (torch.dropout, (X, 0.5, True), {}),
    (torch.dropout, (X, 0.5, False), {}),
    (torch.dropout, (X, 0.0, True), {}),
    (torch.dropout, (X,), {"p": 0.5, "train": False}),
    (torch.ops.aten.dropout.default, (X, 0.5, False), {}),
    (torch.feature_dropout, (X3, 0.5, True), {}),
    (torch.alpha_dropout, (X, 0.5, True), {}),
    (torch.alpha_dropout, (X, 0, True), {}),
    (torch.dropout_, (X, 0.5, True), {}),
    (torch.rrelu, (X, 0.1, 0.3, True), {}),
    (torch.rrelu, (X, 0.1, 0.3), {}),
    (F.rrelu, (X,), {"training": True}),
    (F.rrelu, (X,), {}),
    (F.dropout, (X,), {}),
    (F.dropout, (X, 0.0), {}),
    (F.dropout, (X, 0.5, False), {}),
    (F.dropout, (X,), {"training": False}),
    (F.dropout1d, (X3,), {}),
    (F.dropout2d, (draw(2, 3, 4, 5),), {"training": False}),
    (F.alpha_dropout, (X,), {}),
    (F.alpha_dropout, (X,), {"training": True}),
    (F.feature_alpha_dropout, (X3, 0.5, True), {}),
    (F.gumbel_softmax, (X,), {}),
    (F.scaled_dot_product_attention, (X3, X3, X3), {"dropout_p": 0.5}),
    (F.scaled_dot_product_attention, (X3, X3, X3), {}),
    (F.scaled_dot_product_attention, (X3, X3, X3, None, 0.0, True), {}),
    (F.fractional_max_pool2d, (draw(2, 3, 8, 8), 2), {"output_size": 3}),
    (
        F.fractional_max_pool2d,
        (draw(2, 3, 8, 8), 2),
        {"output_size": 3, "_random_samples": torch.full((2, 3, 2), 0.5, dtype=torch.float64)},
    ),
    (torch.special.xlogy, (X, X.exp()), {}),
    (torch.linalg.norm, (X,), {}),
    (torch.fft.fft, (X,), {}),
    (F.cross_entropy, (X, torch.tensor([0, 1, 2, 3])), {}),
    (F.max_pool1d, (X3, 2), {}),
    (F.gelu, (X,), {}),
    (torch.einsum, ("ij->i", X), {}),
    ("sin", (X,), {}),
    ("norm", (X,), {}),
    ("view", (X, 24), {}),
    ("__radd__", (X, 1), {}),
    (operator.iadd, (X, 1), {}),
    (operator.getitem, (X, 0), {}),
    (getattr, (X, "T"), {}),
    (math.sqrt, (2.0,), {}),
    (T.T.__get__, (X,), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS, ids=[f"{k}-{called(c[0])}" for k, c in enumerate(CALLS)])
def test_draws_says_what_the_generator_says(target: Any, args: Any, kwargs: Any) -> None:
    assert draws(target, args, kwargs) == changes_the_generator(target, args, kwargs)


def test_recurrent_layers_draw_where_they_drop() -> None:
    for dropout, training in ((0.5, True), (0.0, True), (0.5, False)):
        lstm = torch.nn.LSTM(6, 5, 2, dropout=dropout).train(training).double()
        zeros = (torch.zeros(2, 2, 5, dtype=torch.float64),) * 2
        args = (X3, zeros, lstm._flat_weights, True, 2, dropout, training, False, True)
        assert draws(torch._VF.lstm, args) == changes_the_generator(torch._VF.lstm, args, {})
        packed = torch.nn.utils.rnn.pack_padded_sequence(X3, torch.tensor([3, 3]), batch_first=True)
        args = (packed.data, packed.batch_sizes, zeros, lstm._flat_weights, True, 2, dropout, training, False)
        assert draws(torch._VF.lstm, args) == changes_the_generator(torch._VF.lstm, args, {})


def test_no_rule_draws() -> None:
    """Every spelling that the table fuses, at the arguments that its tests call it with."""
    for target, spelling in OVERLOADS.items():
        if spelling.adapt is None and spelling.rule in RULES:
            args, kwargs = call_of(spelling.rule)
            assert not draws(target, args, kwargs), target


def test_what_is_not_known_counts_as_drawing() -> None:
    class Symbol:
        pass

    def random_projection(x: Any) -> Any:
        return x

    others = (torch.manual_seed, torch.nn.init.normal_, "no_such_method")
    for target in (random_projection, lambda x: x, Symbol(), *others):
        assert draws(target)
    assert draws(F.dropout, (X, Symbol()))
    assert draws(F.dropout, (X,), {"training": Symbol()})
    assert draws(torch.dropout, (X, 0.5, Symbol()))
    with torch.library._scoped_library("cupyfuse_test_random", "DEF") as library:
        library.define("mine(Tensor x) -> Tensor")
        assert draws(torch.ops.cupyfuse_test_random.mine.default) and draws(torch.ops.cupyfuse_test_random.mine)


def test_the_functions_that_draw_are_known() -> None:
    """Functions of `torch.nn.functional` whose source calls a generator, or another such function, are listed."""
    for name, function in vars(F).items():
        if isinstance(function, types.FunctionType) and not name.startswith("_") and function.__module__ == F.__name__:
            if "lambda" in function.__code__.co_name or not function.__code__.co_filename.endswith("functional.py"):
                continue
            text = inspect.getsource(function)
            body = text[text.rfind('"""') :] if '"""' in text else text
            asks = any(f"{word}(" in body for word in ("dropout", "rand", "exponential_", "rrelu", "bernoulli"))
            assert asks <= (name in _FUNCTIONAL), name


@pytest.mark.parametrize("name", ["__eq__", "__ne__", "__hash__", "__and__", "__class__"])
def test_names_that_namespaces_have_themselves(name: str) -> None:
    """They are no operators of PyTorch's, though asking its namespace for them finds something."""
    assert not draws(name, (), {})
