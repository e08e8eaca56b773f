"""Every spelling of PyTorch's operations that has a rule, against PyTorch."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_rules import call_of, canonical, check, draw, positive

from cupyfuse.torch.rules import RULES, Refused
from cupyfuse.torch.rules.table import OVERLOADS

F = torch.nn.functional
T = torch.Tensor
DTYPES = (torch.float64, torch.float32)


def adapted() -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Spellings with parameters of their own: the rule, and a call."""
    x, y, p, m = draw(4, 6), draw(4, 6, seed=1), positive(4, 6), draw(4, 6) > 0
    x3, c, square = draw(2, 3, 6), draw(6), draw(6, 3)
    for target in (torch.rrelu, torch.rrelu_, F.rrelu):
        yield "rrelu", target, (x, 0.1, 0.5, False), {}
    for target in (operator.matmul, torch.matmul, T.matmul, T.__matmul__, torch.linalg.matmul, torch.mm, T.mm):
        yield "matmul", target, (x, square), {}
    for target in (torch.mv, T.mv):
        yield "matmul", target, (x, c), {}
    for target in (torch.dot, T.dot):
        yield "matmul", target, (c, c), {}
    yield "matmul", T.__rmatmul__, (square, x), {}
    yield "avg_pool1d", F.avg_pool1d, (x3, (3,)), {"stride": (3,), "padding": (0,), "ceil_mode": True}
    for target in (F.max_pool1d, torch.max_pool1d, F._max_pool1d):
        yield "max_pool1d", target, (x3, 2), {"stride": 2, "ceil_mode": False}
    yield "adaptive_avg_pool1d", F.adaptive_avg_pool1d, (x3, 3), {}
    for name, other in (("max", "maximum"), ("min", "minimum")):
        for target in (getattr(torch, name), getattr(T, name)):
            yield name, target, (x,), {}
            yield f"{name}_dim", target, (x, 1), {}
            yield f"{name}_dim", target, (x,), {"dim": 0, "keepdim": True}
            yield other, target, (x, y), {}
            yield other, target, (x,), {"other": y}
    for name in ("var", "std"):
        for target in (getattr(torch, name), getattr(T, name)):
            for args, more in (((), {}), ((1,), {}), ((0, False, True), {}), ((False,), {}), ((1,), {"correction": 2})):
                yield name, target, (x, *args), more
            yield name, target, (x,), {"axis": 1, "unbiased": False, "keepdims": True}
            yield name, target, (x3, (1, 2)), {"correction": 0.5}
    for name in ("var_mean", "std_mean"):
        target = getattr(torch, name)
        for args, more in (((), {}), ((1,), {}), ((0, False, True), {}), ((False,), {}), ((1,), {"correction": 2})):
            yield name, target, (x, *args), more
    for target in (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, T.norm):
        yield "vector_norm", target, (x,), {}
        for order in (1, 2, 3, math.inf, -math.inf):
            yield "vector_norm", target, (x, order, 1, True), {}
        yield "vector_norm", target, (x,), {"dim": 0, "dtype": torch.float64}
    yield "layer_norm", torch.layer_norm, (x, (6,), c, c, 1e-3, False), {}
    yield "normalize", F.normalize, (x,), {"p": 1.0, "dim": 0, "eps": 1e-3}
    yield "group_norm", torch.group_norm, (x, 3, c, c, 1e-3, False), {}
    yield "instance_norm", F.instance_norm, (x3[:, :1], None, None, c[:1], c[1:2]), {"eps": 1e-3}
    yield "instance_norm", torch.instance_norm, (x3, None, None, None, None, True, 0.1, 1e-5, False), {}
    yield "batch_norm", torch.batch_norm, (x, c, c, c, p[0], False, 0.1, 1e-5, False), {}
    yield "sub", torch.rsub, (x, y), {"alpha": 2}
    yield "sub", T.__rsub__, (x, 2), {}
    for target in (torch.div, T.div, T.div_, torch.divide, T.divide, T.divide_, torch.true_divide, T.true_divide):
        yield "div", target, (x, p), {}
    for target in (T.true_divide_, operator.truediv, T.__truediv__, T.__div__, operator.itruediv, T.__idiv__):
        yield "div", target, (x, p), {}
    yield "div", T.__rdiv__, (p, 3), {}
    for target in (torch.pow, T.pow, T.pow_, operator.pow, T.__pow__, T.__ipow__, operator.ipow):
        yield "pow", target, (p, 1.5), {}
    yield "pow", torch._C.TensorBase.pow, (p, y), {}
    yield "pow", torch._C.TensorBase.pow_, (p, y), {}
    yield "pow", T.__rpow__, (x, 1.5), {}
    for target in (torch.round, T.round, torch.special.round, torch.round_, T.round_):
        yield "round", target, (x,), {}
    for target in (torch.clamp_min, T.clamp_min, torch.clamp_min_, T.clamp_min_):
        yield "clamp", target, (x, 0.25), {}
    for target in (torch.clamp_max, T.clamp_max, torch.clamp_max_, T.clamp_max_):
        yield "clamp", target, (x,), {"max": 0.25}
    yield "where", torch.where, (m, x, 0.5), {}
    yield "where", T.where, (x, m, y), {}
    longer = {"gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "ne": "not_equal", "eq": ""}
    for name, long in longer.items():
        for target in (getattr(torch, name), getattr(T, name), getattr(operator, name), getattr(T, f"__{name}__")):
            yield name, target, (x, 0.5), {}
        if long:
            yield name, getattr(torch, long), (x, y), {}
            yield name, getattr(T, long), (x, y), {}
    for name in ("and", "or", "xor"):
        rule, word = f"bitwise_{name}", name + "_" * (name != "xor")
        for target in (getattr(torch, rule), getattr(T, rule), getattr(T, rule + "_"), getattr(operator, word)):
            yield rule, target, (m, y > 0), {}
        for prefix in "", "r", "i":
            yield rule, getattr(T, f"__{prefix}{name}__"), (m, y > 0), {}
        yield rule, getattr(operator, f"i{name}"), (m, y > 0), {}
    yield "to", T.to, (x, torch.float32), {"non_blocking": True, "copy": False}
    yield "to", T.to, (x,), {"dtype": torch.float32}
    yield "type_as", T.to, (x, y.float()), {}
    yield "identity", T.to, (x,), {"memory_format": torch.preserve_format}
    yield "to", T.type, (x, torch.float32), {}
    for target in (T.float, T.double, T.half, T.bfloat16, T.bool):
        yield "to", target, (x,), {}
    yield "to", T.long, (m,), {}
    yield "type_as", T.type_as, (x, y.float()), {}
    for target in (F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout):
        yield "identity", target, (x3,), {"training": False}
    yield "identity", F.dropout2d, (draw(2, 3, 4, 5),), {"training": False}
    yield "identity", F.dropout3d, (draw(2, 3, 4, 5, 2),), {"training": False}
    for target in (torch.dropout, torch.alpha_dropout, torch.feature_dropout):
        yield "identity", target, (x3, 0.5, False), {}
    yield "contiguous", T.contiguous, (x,), {"memory_format": torch.contiguous_format}
    yield "detach", T.data.__get__, (x,), {}
    for target in (torch.reshape, T.reshape, T.view):
        yield "reshape", target, (x, (2, 3, -1)), {}
    yield "reshape", T.view, (x, 2, 3, -1), {}
    yield "flatten", torch.ravel, (x3,), {}
    yield "flatten", T.ravel, (x3,), {}
    for target in (torch.unflatten, T.unflatten):
        yield "unflatten", target, (x, 1, (2, -1)), {}
    for target in (torch.t, T.t, T.T.__get__, torch.ops.aten.numpy_T):
        yield "t", target, (x,), {}
    for target in (torch.transpose, T.transpose, torch.swapaxes, T.swapaxes, torch.swapdims, T.swapdims):
        yield "transpose", target, (x, 0, -1), {}
    for target in (T.mT.__get__, torch.ops.aten.mT):
        yield "transpose", target, (x,), {}
    yield "permute", torch.permute, (x3, (2, 0, 1)), {}
    yield "permute", T.permute, (x3, 1, 2, 0), {}
    yield "expand", T.expand, (x[:1], 4, -1), {}
    yield "expand", torch.broadcast_to, (c, (4, 6)), {}
    yield "expand", T.broadcast_to, (c, (2, 3, 6)), {}
    yield "expand_as", T.expand_as, (draw(2, 1, 1), x3), {}
    yield "view_as", T.view_as, (x, draw(2, 2, 6)), {}
    yield "view_as", T.reshape_as, (x, draw(2, 2, 6)), {}
    labels, unit = torch.tensor([0, 5, -100, 2]), p / (1 + p)
    for target in (torch.take_along_dim, T.take_along_dim):
        yield "gather", target, (x, labels.clamp(0)[:, None], 1), {}
    yield "nll_loss", F.nll_loss, (x, labels, p[0]), {"reduction": "sum"}
    yield "cross_entropy", F.cross_entropy, (x, labels), {"label_smoothing": 0.25, "reduction": "none"}
    for size_average, reduce in ((True, None), (False, None), (None, False), (False, True), (True, False)):
        for name in ("cross_entropy", "nll_loss"):
            more = {"size_average": size_average, "reduce": reduce}
            yield name, getattr(F, name), (x, labels), more
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss"):
            yield name, getattr(F, name), (x, y), more
        yield "hinge_embedding_loss", F.hinge_embedding_loss, (x, y.sign(), 0.5), more
        yield "margin_ranking_loss", F.margin_ranking_loss, (x, y, y.sign(), 0.5), more
        for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
            yield name, getattr(F, name), (unit, unit.flip(0), p), more
    yield "huber_loss", F.huber_loss, (x, y, "sum", 0.5), {}
    if hasattr(F, "linear_cross_entropy"):
        more = {"linear_bias": c, "weight": p[0], "label_smoothing": 0.1}
        yield "linear_cross_entropy", F.linear_cross_entropy, (draw(4, 3), square, labels), more
    for target in (operator.getitem, T.__getitem__):
        yield "getitem", target, (x, (Ellipsis, None)), {}
        yield "getitem", target, (x3[:, :1], (slice(None), 0)), {}
        yield "getitem", target, (x3, (Ellipsis, slice(-4, None))), {}
    for target in (torch.split, torch._VF.split, T.split):
        yield "split", target, (x, 4, -1), {}
        yield "split", target, (x, [1, 2, 3]), {"dim": 1}
    yield "split", T.split, (x,), {"split_size": 3, "dim": 1}
    for target in (torch.cat, torch.concat, torch.concatenate):
        yield "cat", target, ((x, p[:, :1]), 1), {}
        yield "cat", target, ((x, y),), {"axis": 1}
        yield "cat", target, ([x3, y[:2, None].expand(2, 3, 6).contiguous()],), {"dim": -1}


def changes_in_place(target: Any) -> bool:
    name = target.__name__
    if isinstance(target, types.BuiltinFunctionType) and target.__module__ == "_operator":
        return name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")
    return name.startswith("__i") and name != "__invert__" if name.startswith("__") else name.endswith("_")


SHAPE_CHANGING = {t for t in OVERLOADS if changes_in_place(t) and RULES[OVERLOADS[t].rule].no_op}
PLAIN = [t for t, spelling in OVERLOADS.items() if spelling.adapt is None and t not in SHAPE_CHANGING]
ADAPTED = list(adapted())


def named(target: Any) -> str:
    return f"{getattr(target, '__qualname__', '')}-{OVERLOADS[target].rule}"


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", PLAIN, ids=named)
def test_spellings_with_canonical_parameters(target: Any, dtype: torch.dtype) -> None:
    name = OVERLOADS[target].rule
    args, kwargs = call_of(name, dtype)
    found = check(target, *args, **kwargs)
    assert found.rule is RULES[name]
    assert found.inplace == changes_in_place(target)


@pytest.mark.parametrize(
    ("rule", "target", "args", "kwargs"), ADAPTED, ids=[f"{r}-{k}" for k, (r, *_) in enumerate(ADAPTED)]
)
def test_spellings_with_parameters_of_their_own(rule: str, target: Any, args: Any, kwargs: Any) -> None:
    found = check(target, *args, **kwargs)
    assert found.rule is RULES[rule]
    assert found.inplace == changes_in_place(target)


def test_every_spelling_is_tested() -> None:
    tested = {t for _, t, _, _ in ADAPTED} | set(PLAIN) | SHAPE_CHANGING
    assert not set(OVERLOADS) - tested, set(OVERLOADS) - tested


def test_every_rule_is_tested() -> None:
    """All but those without a spelling: of a whole module, a term of a loss."""
    unspelled = {"batch_norm_module", "z_loss"}
    spelled = {OVERLOADS[t].rule for t in PLAIN} | {rule for rule, *_ in ADAPTED}
    assert spelled | {"linear_cross_entropy"} == set(RULES) - unspelled


@pytest.mark.parametrize("target", sorted(SHAPE_CHANGING, key=named), ids=named)
def test_changes_of_shape_in_place_are_refused(target: Any) -> None:
    args, kwargs = call_of(OVERLOADS[target].rule)
    found, _ = canonical(target, args, kwargs)
    assert isinstance(found, Refused) and "shape in place" in found.reason
