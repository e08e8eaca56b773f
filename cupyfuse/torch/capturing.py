"""What holds for Dynamo and for the thread while a frame of a fused module is captured, and at no other time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributions import Distribution

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
            _refusing_gradient_modes(),
            _finding_numbers(),
            _comparing_numbers(),
            _formatting_numbers(),
            _keeping_deques(),
            _knowing_ranges(),
            _leaving_generators(),
        ):
            yield
    finally:
        torch._C._set_grad_enabled(recording)


def _refusing_gradient_modes() -> Any:
    """Leave code to eager that an object such as `torch.no_grad()` outlives: returned, kept, or held at a graph break.

    Dynamo would make a `torch.set_grad_enabled` in its place, which changes the mode where the object only could, and
    which later puts back the mode that it finds there, not the one before.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables.ctx_manager import GradModeVariable

    def refuse(*arguments: Any) -> None:
        raise Unsupported("an object that switches gradients outlives the code that made it")

    return mock.patch.object(GradModeVariable, "reconstruct", refuse)


@contextlib.contextmanager
def _finding_numbers() -> Iterator[None]:
    """Have `k in numbers` look at numbers that Dynamo has made symbols, since they change from call to call.

    It takes these for other numbers than any constant, without a guard. Here they are what they are in this call, and
    other ones are captured anew.
    """
    from torch._dynamo import utils
    from torch._dynamo.variables import lists

    original = utils.iter_contains

    def all_known(item: Any) -> Any:
        if type(item) in (lists.ListVariable, lists.TupleVariable):
            return item.clone(items=list(map(all_known, item.items)))
        return _known(item)

    def contains(items: Iterable[Any], search: Any, tx: Any, *options: Any, **more: Any) -> Any:
        search, *items = _known_where_needed([search, *items])
        return original(map(all_known, items) if search.is_python_constant() else items, search, tx, *options, **more)

    with mock.patch.object(utils, "iter_contains", contains), mock.patch.object(lists, "iter_contains", contains):
        yield


@contextlib.contextmanager
def _comparing_numbers() -> Iterator[None]:
    """Compare numbers that Dynamo has made symbols with what is no plain number, such as members of an `IntEnum`.

    It takes these for unequal, without a guard. Here they are what they are in this call, and other ones are captured
    anew.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import SymNodeVariable

    handlers = symbolic_convert.compare_op_handlers
    original: Any = getattr(SymNodeVariable, "richcompare_impl", None)  # PyTorch 2.13's, for elements of tuples

    def handler(compare: Any) -> Any:
        return lambda tx, compared, options: compare(tx, _known_where_needed(compared), options)

    def compare(self: Any, tx: Any, other: Any, operator: str) -> Any:
        number, other = _known_where_needed([self, other])
        return (original if number is self else type(number).richcompare_impl)(number, tx, other, operator)

    replaced = {sign: handler(handlers[sign]) for sign in ("==", "!=", "<", "<=", ">", ">=")}
    with (
        mock.patch.dict(handlers, replaced),
        mock.patch.object(SymNodeVariable, "richcompare_impl", compare, create=True),
    ):
        yield


def _known(variable: Any) -> Any:
    """Give a symbol among Dynamo's variables the number that it is; calls with another one are captured anew."""
    from torch._dynamo.variables import ConstantVariable, SymNodeVariable

    is_symbol = isinstance(variable, SymNodeVariable)
    return ConstantVariable.create(variable.evaluate_expr()) if is_symbol else variable


def _known_where_needed(compared: Sequence[Any]) -> list[Any]:
    """Give symbols among Dynamo's variables the numbers that they are, if others are neither numbers nor tensors."""
    from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable

    found = [each.realize() for each in compared]
    if all(isinstance(each, (ConstantVariable, SymNodeVariable, TensorVariable)) for each in found):
        return found
    return list(map(_known, found))


@contextlib.contextmanager
def _formatting_numbers() -> Iterator[None]:
    """Have strings that are formatted from arguments or attributes be what they are in eager.

    In the place of `f"{k}"` Dynamo would load `k` itself; `"{}".format(k)` would be no key of a dictionary and equal
    no string; and of `format(k, "03d")` it would leave the specification out.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SymNodeVariable

    of_string: Any = InstructionTranslatorBase._format_value
    of_call: Any = BuiltinVariable.call_format  # of `format`, and of `str.format` with the string first

    def format_value(self: Any, specification: Any, flags: int) -> None:
        if isinstance(self.stack[-1], SymNodeVariable):
            self.push(self.pop().clone(source=None))
        of_string(self, specification, flags)

    def call_format(self: Any, tx: Any, *arguments: Any, **named: Any) -> Any:
        given = [_known(a.realize()) for a in arguments]
        if self.fn is format and all(a.is_python_constant() for a in given):
            return ConstantVariable.create(format(*(a.as_python_constant() for a in given)))
        return of_call(self, tx, *given, **{name: _known(a.realize()) for name, a in named.items()})

    with (
        mock.patch.object(InstructionTranslatorBase, "_format_value", format_value),
        mock.patch.object(BuiltinVariable, "call_format", call_format),
    ):
        yield


@contextlib.contextmanager
def _keeping_deques() -> Iterator[None]:
    """Have deques keep to their `maxlen`, and those that exist before the call change in eager: graphs break there.

    Dynamo takes the `maxlen` of an existing deque, of a copy and of a product for None. After a change in a graph it
    stores a copy where the code stores the deque itself.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, lists
    from torch._dynamo.variables.base import ValueMutationExisting, ValueMutationNew

    variable_of, mutation = lists.BaseListVariable.cls_for_instance, SideEffects.mutation

    def variable_with_length_of(value: Any) -> Any:
        if type(value) is not deque:
            return variable_of(value)

        def make(items: list[Any], source: Any) -> Any:
            install_guard(AttrSource(source, "maxlen").make_guard(GuardBuilder.EQUALS_MATCH))
            return lists.DequeVariable(items, maxlen=ConstantVariable.create(value.maxlen), source=source)

        return make

    def modified(self: Any, items: list[Any], **options: Any) -> Any:
        return type(self)(items, maxlen=self.maxlen, **options)

    def repeated(self: Any, tx: Any, count: Any) -> Any:
        return modified(self, self.items * count.as_python_constant(), mutation_type=ValueMutationNew())

    def mutation_of_others(self: Any, variable: Any) -> None:
        if isinstance(variable, lists.DequeVariable) and isinstance(variable.mutation_type, ValueMutationExisting):
            raise Unsupported("a deque that exists before the call changes")
        mutation(self, variable)

    with (
        mock.patch.object(lists.BaseListVariable, "cls_for_instance", staticmethod(variable_with_length_of)),
        mock.patch.object(lists.DequeVariable, "modified", modified),
        mock.patch.object(lists.DequeVariable, "sq_repeat_impl", repeated, create=True),  # PyTorch 2.13's
        mock.patch.object(SideEffects, "mutation", mutation_of_others),
    ):
        yield


@contextlib.contextmanager
def _knowing_ranges() -> Iterator[None]:
    """Have `f(*range(3))` pass 0, 1, 2, and `k in range(3)` be a bool.

    Dynamo takes start, stop and step of a range for the elements of a list, and how often it has `k` for the answer.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import ConstantVariable, lists

    def contains(self: Any, tx: Any, item: Any) -> Any:
        return ConstantVariable.create(bool(self.range_count(item)))

    others = tuple(kind for kind in lists.BaseListVariable.__subclasses__() if kind is not lists.RangeVariable)
    with (
        mock.patch.object(symbolic_convert, "BaseListVariable", others),
        mock.patch.object(lists.RangeVariable, "sq_contains", contains, create=True),  # PyTorch 2.13's
    ):
        yield


def _leaving_generators() -> Any:
    """Break graphs where an existing `random.Random` is used: Dynamo would draw what the captured call draws."""
    from torch._dynamo.variables import RandomVariable

    return mock.patch.object(RandomVariable, "is_supported_random_obj", staticmethod(lambda generator: False))


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
