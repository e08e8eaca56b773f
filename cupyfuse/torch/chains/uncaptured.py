"""Keep Dynamo out of functions that PyTorch calls while a module's code runs, such as backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def uncaptured(function: F) -> F:
    """Have Dynamo skip a function's frames and those of all that it calls; unlike `torch.compiler.disable`, for free.

    Where a captured graph breaks, Dynamo captures whatever Python code runs then: that of an autograd function, too.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
