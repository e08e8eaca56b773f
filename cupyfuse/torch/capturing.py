"""What holds for Dynamo and for the thread while a frame of a fused module is captured, and at no other time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributions import Distribution

from .corrections import corrected

_CONFIG = {
    "recompile_limit": 256,  # modules with many instances and shapes stay captured
    "accumulated_recompile_limit": 4096,
    "skip_nnmodule_hook_guards": False,  # hooks that are added later run
    "allow_unspec_int_on_nn_module": True,  # a counter becomes a symbol instead of a capture for each value
    "use_numpy_random_stream": True,  # the graph breaks where NumPy draws: PyTorch would draw in its place
    "invalidate_compile_context_weakrefs": True,  # parameters with weak references cannot be swapped for others
    "record_runtime_overhead": False,  # notes for profilers, two calls of Dynamo's around each graph
    "rewrite_assert_with_torch_assert": False,  # it would raise a RuntimeError, and on a GPU end the CUDA context
    "optimize_ddp": False,  # autograd runs eagerly, so that DDP's buckets need no graph breaks
}
# PyTorch 2.11 skips guards where dictionaries are unchanged, and does not see `requires_grad_()` of a parameter that
# was replaced, nor other values in closures of methods.
if torch.__version__ < (2, 13):
    _CONFIG |= {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "skip_guards_on_constant_func_defaults": False,
    }

# The default of `Distribution` while it is captured, as under `torch.compile`: to look at arguments would break graphs.
# It is no bool, so that a guard tells it from what a distribution says itself.
_NO_VALIDATION = 0


@contextlib.contextmanager
def keeping_validation() -> Iterator[None]:
    """Have distributions outside of captured code validate their arguments as before.

    Dynamo ends that for the whole process as it is first used. The user's own first `torch.compile` still does.
    """
    from torch._dynamo.eval_frame import TorchPatcher

    before, is_first = Distribution._validate_args, not TorchPatcher.patch.cache_info().currsize
    try:
        yield
    finally:
        if is_first:
            Distribution.set_default_validate_args(before)
            TorchPatcher.patch.cache_clear()


def guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Say which of Dynamo's guards hold in calls: all but those on `_NO_VALIDATION`."""
    _forget_guarded_objects(guards)
    return [not ("_validate_args" in g.name and type(g.value) is type(_NO_VALIDATION)) for g in guards]


def _forget_guarded_objects(guards: Sequence[Any]) -> None:
    """Have Dynamo not compare what it guarded when it makes the guards again, after it has asked which to keep.

    For an array of NumPy's that object is a tensor which it makes anew each time, and two tensors compare by element.
    """
    for guard in guards:
        guard.orig_guard.obj_weakref = None


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """One capture at a time, with `_CONFIG` in force.

    Afterwards the thread has its gradient mode and dispatch keys again, which failed captures may leave changed.
    """
    from torch._dynamo.convert_frame import compile_lock

    known = {name: value for name, value in _CONFIG.items() if hasattr(torch._dynamo.config, name)}
    recording = torch.is_grad_enabled()
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    try:
        with (
            compile_lock,  # Dynamo's own, which every capture takes: a second lock could be waited for in another order
            torch._dynamo.config.patch(known),
            mock.patch.object(Distribution, "_validate_args", _NO_VALIDATION),
            torch._C._ForceDispatchKeyGuard(included, excluded),
            corrected(),
        ):
            yield
    finally:
        torch._C._set_grad_enabled(recording)


class Answers(dict[Any, Any]):
    """What captured code finds when it asks for the state of tracing: that it is not compiled.

    Attributes
    ----------
    asked : bool
        Whether it asked.
    """

    def __init__(self, answers: dict[Any, Any]):
        from torch._dynamo import external_utils

        self._functions = {torch.compiler.is_compiling, torch._utils.is_compiling, external_utils.is_compiling}
        super().__init__({**answers, **dict.fromkeys(self._functions, False)})
        self.asked = False

    def __getitem__(self, function: Any) -> Any:
        self.asked = self.asked or function in self._functions
        return super().__getitem__(function)


@contextlib.contextmanager
def running_eagerly() -> Iterator[Answers]:
    """Make `torch.compiler.is_compiling()` false for captured code; for use within `capturing`.

    The graphs run in eager, and code that asks takes paths for compilers that are slower there, such as attention with
    a mask that excludes nothing. `is_dynamo_compiling()` stays true.
    """
    from torch._dynamo.variables import torch as variables

    answers = Answers(variables.tracing_state_functions())
    with mock.patch.object(variables, "tracing_state_functions", lambda: answers):
        yield answers


# What Dynamo says of operations that it cannot run on fake tensors, of guards that it cannot make, and of numbers that
# break graphs: none of it stops a call, and `explain` tells what was not captured, and why.
_LOGGERS = ("torch._subclasses.fake_tensor", "torch._guards", "torch._dynamo.variables.tensor")


@contextlib.contextmanager
def without_messages() -> Iterator[None]:
    """Keep what `_LOGGERS` say in this thread to themselves."""
    thread, loggers = threading.get_ident(), [logging.getLogger(name) for name in _LOGGERS]

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    for logger in loggers:
        logger.addFilter(from_elsewhere)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(from_elsewhere)
