"""Recognise inputs like those of an earlier call, without a key to make and to hash.

Dynamo's guards compare tensors: their types, dispatch keys, dtypes, devices, shapes, strides and whether gradients are
wanted, in C++ for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ...generated import Constants, define
from .eligibility import is_recording
from .tensors import Tensors

Matches = Callable[[Tensors], bool]
# Takes what a backward pass is called with; returns the gradients, or None where the call is not like the earlier one.
BackwardCall = Callable[[Tensors, Tensors, "tuple[bool, ...]"], "list[Any] | None"]


def matcher(
    tensors: Tensors,
    numbers: Sequence[int],
    current_precision: Callable[[], str] | None = None,
    fixed: Collection[int] = (),
) -> Matches:
    """Return a function that tells whether inputs are like these, in a call with the same settings of PyTorch's.

    In inference mode calls are like those without gradients. A parameter is not like a tensor. Inputs that are one
    tensor have to be one again, others different ones.

    Parameters
    ----------
    tensors : strided tensors of PyTorch's own types
    numbers : which of them are compared
    current_precision : returns the precision of products; None for chains that do not depend on it
    fixed : those of the numbers of which weights may be prepacked, unless they are of inference mode
    """
    constants = Constants(
        grad=torch.is_grad_enabled,
        inference=torch.is_inference_mode_enabled,
        default=torch.get_default_dtype,
        strided=torch.strided,
    )
    name = constants.name
    distinct: dict[int, int] = {}  # numbers, by the identities of their tensors: guards refuse one that comes twice
    lines, memory, same = [], [], []
    for k in numbers:
        lines.append(f"t{k} = tensors[{k}]")
        # The guards ask for strides, without a way to fail: those of what is no strided memory would end the process.
        # Numbers have no layout, and subclasses of tensors may refuse to tell theirs.
        memory.append(f"type(t{k}) is {name(type(tensors[k]))} and t{k}.layout is strided and not t{k}.is_nested")
        first = distinct.setdefault(id(tensors[k]), k)
        if first != k:
            same.append(f"t{k} is t{first}")
        if k in fixed and tensors[k].is_inference():
            same.append(f"t{k}.is_inference()")  # in inference mode the dispatch keys do not tell
    if distinct:
        guards = torch._C._dynamo.guards.TensorGuards(
            *(tensors[k] for k in distinct.values()), dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        same.insert(0, f"{name(guards.check)}({', '.join(f't{k}' for k in distinct.values())})")
    same.append("grad() and not inference()" if is_recording() else "(not grad() or inference())")
    same.append(f"default() is {name(torch.get_default_dtype())}")
    if current_precision is not None:
        same.append(f"{name(current_precision)}() == {current_precision()!r}")
    lines.append(f"return {' and '.join([*memory, *same])}")
    return define("matches", "tensors", lines, constants)


def backward_call(
    tensors: Tensors,
    cotangents: Mapping[int, Any],
    outputs: int,
    absent: Sequence[int],
    wanted: tuple[bool, ...],
    run: Callable[[Tensors], Tensors],
    gradients: Sequence[int | Callable[[], Any] | None],
) -> BackwardCall:
    """Return a function for backward passes like this one.

    It compares what decides between plans: shapes and strides, and the device that all tensors share; autograd has seen
    to the dtypes.

    Parameters
    ----------
    tensors : the inputs and saved values that it reads
    cotangents : those that it reads, by output
    outputs : how many there are
    absent : the differentiable ones whose cotangents are None
    wanted : for each input, whether its gradient is wanted
    run : takes `tensors`, then the cotangents, which it takes to lie in memory as these do
    gradients : of each input the number of a result of `run`, what makes it, or None
    """
    constants = Constants(run=run)
    name = constants.name
    read = {f"t{k}": t for k, t in enumerate(tensors)} | {f"d{k}": c for k, c in cotangents.items()}
    like = [f"wanted == {name(wanted)}", *(f"d{k} is None" for k in absent)]
    like += [f"d{k} is not None" for k in cotangents]
    first, tensor = next(iter(read.items()))
    like.append(f"{first}.device == {name(tensor.device)}")
    for each, t in read.items():
        like += [f"{each}.stride() == {name(t.stride())}", f"{each}.shape == {name(t.shape)}"]
    unpacked = {"tensors": [f"t{k}" for k in range(len(tensors))], "cotangents": [f"d{k}" for k in range(outputs)]}
    lines = [f"({', '.join(names)},) = {source}" for source, names in unpacked.items() if names]
    lines += [f"if not ({' and '.join(like)}):", "    return None", f"g = run([{', '.join(read)}])"]
    found = [f"g[{r}]" if isinstance(r, int) else "None" if r is None else f"{name(r)}()" for r in gradients]
    lines.append(f"return [{', '.join(found)}]")
    return define("backward", "tensors, cotangents, wanted", lines, constants)
