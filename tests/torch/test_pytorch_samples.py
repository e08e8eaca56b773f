"""The samples of PyTorch's own tests of its operations: every rule that takes one gives what PyTorch gives."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_rules import canonical, check, same_gradients, traced

from cupyfuse.errors import TraceError
from cupyfuse.torch.rules import Found
from cupyfuse.torch.rules.table import OVERLOADS

LOSSES = (
    *("cross_entropy", "nll_loss", "kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss"),
    "margin_ranking_loss",
)

PARTS = 3  # of all operations


def samples(
    dtype: torch.dtype, names: tuple[str, ...] | None = None, reference: bool = False, part: slice = slice(None)
) -> Iterator[tuple[Any, ...]]:
    """Yield operation, arguments, named arguments, and what to call the sample; of a part of the operations.

    `reference` yields more of them: broadcasting, strides, special values.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        # Each iterator over samples would look through the sources of its callers for a unittest's method.
        assert hasattr(module, "extract_test_fn")
        vars(module)["extract_test_fn"] = lambda: None
    for op in op_db[part]:
        short = op.name.removeprefix("nn.functional.")
        if op.op not in OVERLOADS or dtype not in op.dtypes or (names is not None and short not in names):
            continue
        for number, sample in enumerate((op.reference_inputs if reference else op.sample_inputs)("cpu", dtype)):
            arguments = (sample.input, *sample.args)
            # PyTorch's samples call `Tensor.__rsub__` of numbers too.
            if any(isinstance(a, torch.Tensor) for a in arguments[: 1 if short.startswith("__") else None]):
                yield op.op, arguments, sample.kwargs, f"{short}, sample {number}"


def reason_to_leave(target: Any, arguments: Any, options: Any) -> str:
    """Why a call is left to PyTorch; an empty string if a rule takes it."""
    found, tensors = canonical(target, arguments, options)
    if not isinstance(found, Found):
        return "refused"
    try:
        _, values = traced(found.rule, found.arguments, tensors)
    except TraceError as error:
        return str(error)
    expected = found.rule.eager(*[tensors[a.number] if hasattr(a, "number") else a for a in found.arguments])
    expected = expected[0] if isinstance(expected, tuple) else expected
    same = values[0] is not None and values[0].dtype == str(expected.dtype).removeprefix("torch.")
    return "" if same else "another dtype"


@pytest.mark.rotates
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "reference"),
    [(torch.float32, True), (torch.bfloat16, False), (torch.int64, False)],
    ids=str,
)
@pytest.mark.parametrize("part", range(PARTS))
def test_samples_of_all_operations(dtype: torch.dtype, reference: bool, part: int) -> None:
    """What a rule takes is right; what none takes is left with a reason."""
    counts: collections.Counter[str] = collections.Counter()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(dtype, 0.0)
    for target, arguments, options, name in samples(dtype, None, reference, slice(part, None, PARTS)):
        try:
            if reason := reason_to_leave(target, arguments, options):
                counts[reason] += 1
                continue
            check(target, *arguments, tolerance=tolerance, **options)
        except Exception as error:
            raise AssertionError(f"{name}: {arguments}, {options}") from error
        counts["right"] += 1
    assert counts["right"] > (200 if dtype.is_floating_point else 20) // PARTS, counts


@pytest.mark.rotates
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_of_losses(dtype: torch.dtype) -> None:
    """Values and gradients, for every option in the samples: reductions, weights, ignored labels, smoothing, ranks."""
    done: collections.Counter[str] = collections.Counter()
    for target, arguments, options, name in samples(dtype, LOSSES):
        try:
            reason = reason_to_leave(target, arguments, options)
            # Classes along a dimension between others are PyTorch's own.
            assert not reason or "dimension" in reason, reason
            if not reason:
                check(target, *arguments, **options)
                same_gradients(target, *arguments, wanted=[0], **options)
                done[name.partition(",")[0]] += 1
        except Exception as error:
            raise AssertionError(f"{name}: {arguments}, {options}") from error
    assert set(LOSSES) == set(done), done
