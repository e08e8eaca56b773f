"""Recognise inputs like those of an earlier call by one generated expression.

It compares what `eligibility.signature_of` and the key of `Runner` consist of: without a tuple to make and to hash, a
call takes 1 us less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...generated import Constants, define
from .tensors import Tensors

Matches = Callable[[Tensors], bool]


def matcher(tensors: Tensors, numbers: Sequence[int], current_precision: Callable[[], str] | None) -> Matches:
    """Return a function that tells whether inputs are like these, in a call with the same settings of PyTorch's.

    Parameters
    ----------
    tensors : plain strided tensors
    numbers : which of them are compared
    current_precision : returns the precision of products; None for chains that do not depend on it
    """
    constants = Constants(grad=torch.is_grad_enabled, default=torch.get_default_dtype)
    name = constants.name
    lines, same = [], []
    for k in numbers:
        t = tensors[k]
        lines.append(f"t{k} = tensors[{k}]")
        same += [f"type(t{k}) is {name(type(t))}", f"t{k}.layout is {name(t.layout)}"]  # others may have no strides
        same += [f"t{k}.shape == {name(t.shape)}", f"t{k}.stride() == {name(t.stride())}"]
        same += [f"t{k}.dtype is {name(t.dtype)}", f"t{k}.requires_grad is {t.requires_grad}"]
        same += [f"t{k}.device == {name(t.device)}", f"t{k}.is_neg() is {t.is_neg()}"]
        same.append(f"t{k}._is_zerotensor() is {t._is_zerotensor()}")  # one without memory
    same += [f"grad() is {torch.is_grad_enabled()}", f"default() is {name(torch.get_default_dtype())}"]
    if current_precision is not None:
        same.append(f"{name(current_precision)}() == {current_precision()!r}")
    lines.append(f"return {' and '.join(same)}")
    guarded = ["try:", *(f"    {line}" for line in lines), "except RuntimeError:", "    return False"]  # nested tensors
    return define("matches", "tensors", guarded, constants)
