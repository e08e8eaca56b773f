"""What Dynamo gets wrong without saying so, set right while a frame of a fused module is captured.

Each correction replaces methods of Dynamo's, which have other names in other releases of PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
import warnings
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

_UNTESTED = (2, 16)  # the first release of PyTorch that no test has seen
# Code that catches errors of what is not meant to change: Dynamo's, in the place of functions in C, what reads the
# signatures of functions, and what reads environment variables, which nothing guards.
_FOLLOWED = (os.path.join("torch", "_dynamo", "polyfills"), inspect.__file__, os.__file__, "<frozen os>")
# Where the end of a sequence is told by an IndexError, which depends on a length: that is guarded.
_SEQUENCES = ("<frozen _collections_abc>", abc.__file__)


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Have all corrections in force."""
    with contextlib.ExitStack() as stack:
        for correction in _CORRECTIONS:
            _enter(stack, correction)
        yield


def _enter(stack: contextlib.ExitStack, correction: Callable[[], Any]) -> None:
    """Enter a correction; warn where a release that no test has seen lacks what it replaces."""
    try:
        stack.enter_context(correction())
    except (AttributeError, ImportError) as missing:
        if torch.__version__ < _UNTESTED:
            raise
        _warn_of_release(str(missing))


@functools.cache
def _warn_of_release(missing: str) -> None:
    warnings.warn(
        f"cupyfuse is tested with PyTorch 2.11 to 2.15. In {torch.__version__}, {missing}: what Dynamo gets wrong of "
        "deques, ranges, numbers or gradient modes in captured code may stay wrong. Use a tested release of PyTorch, "
        "or a newer one of cupyfuse",
        stacklevel=2,
    )


def _replaced(owner: Any, name: str, replacement: Any) -> Any:
    """Replace what some releases of PyTorch lack, which have it under another name, or need no correction."""
    return mock.patch.object(owner, name, replacement) if hasattr(owner, name) else contextlib.nullcontext()


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
    # What compares elements of tuples from PyTorch 2.13 on, and its name from 2.14 on.
    methods = [name for name in ("richcompare_impl", "tp_richcompare_impl") if hasattr(SymNodeVariable, name)]

    def handler(compare: Any) -> Any:
        return lambda tx, compared, options: compare(tx, _known_where_needed(compared), options)

    def method(name: str) -> Any:
        original = getattr(SymNodeVariable, name)

        def compare(self: Any, tx: Any, other: Any, operator: str) -> Any:
            number, other = _known_where_needed([self, other])
            of_number = original if number is self else getattr(type(number), name)
            return of_number(number, tx, other, operator)

        return compare

    replaced = {sign: handler(handlers[sign]) for sign in ("==", "!=", "<", "<=", ">", ">=")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(handlers, replaced))
        for name in methods:
            stack.enter_context(mock.patch.object(SymNodeVariable, name, method(name)))
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
    make_variable, method = lists.DequeVariable.__init__, lists.DequeVariable.call_method

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

    def init(self: Any, items: list[Any], **options: Any) -> None:
        if "maxlen" not in options:  # of sums and products before PyTorch 2.13, of derived classes from 2.14 on
            raise Unsupported("a deque whose maxlen is not told")
        make_variable(self, items, **options)

    def call_method(self: Any, tx: Any, name: str, *arguments: Any) -> Any:
        if name in ("__iadd__", "__imul__"):
            raise Unsupported("a deque is added to, or repeated, by its method")
        return method(self, tx, name, *arguments)

    def mutation_of_others(self: Any, variable: Any) -> None:
        if isinstance(variable, lists.DequeVariable) and isinstance(variable.mutation_type, ValueMutationExisting):
            raise Unsupported("a deque that exists before the call changes")
        mutation(self, variable)

    with (
        mock.patch.object(lists.BaseListVariable, "cls_for_instance", staticmethod(variable_with_length_of)),
        _replaced(lists.DequeVariable, "modified", modified),
        _replaced(lists.DequeVariable, "sq_repeat_impl", repeated),  # from PyTorch 2.13 on
        mock.patch.object(lists.DequeVariable, "__init__", init),
        mock.patch.object(lists.DequeVariable, "call_method", call_method),
        mock.patch.object(SideEffects, "mutation", mutation_of_others),
    ):
        yield


def _keeping_orders() -> Any:
    """Have dictionaries from before the call in the order that `OrderedDict.move_to_end` gives their items.

    Dynamo stores items that are new or have other values, or all of them where one was removed.
    """
    from torch._dynamo.variables import ConstDictVariable

    has_new_items: Any = ConstDictVariable.has_new_items

    def has_changed(self: Any) -> bool:
        kept = [key.vt for key in self.items if key.vt in self.original_items]
        found = set(map(id, kept))
        if list(map(id, kept)) != [id(key) for key in self.original_items if id(key) in found]:
            self.should_reconstruct_all = True
        return bool(has_new_items(self))

    return mock.patch.object(ConstDictVariable, "has_new_items", has_changed)


@contextlib.contextmanager
def _knowing_ranges() -> Iterator[None]:
    """Have `f(*range(3))` pass 0, 1, 2, and `k in range(3)` be a bool.

    Dynamo takes start, stop and step of a range for the elements of a list, and how often it has `k` for the answer.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import ConstantVariable, lists

    method = lists.RangeVariable.call_method

    def contains(self: Any, tx: Any, item: Any) -> Any:
        return ConstantVariable.create(bool(self.range_count(item)))

    def call_method(self: Any, tx: Any, name: str, arguments: Any, named: Any) -> Any:
        is_asked = name == "__contains__" and len(arguments) == 1
        return contains(self, tx, *arguments) if is_asked else method(self, tx, name, arguments, named)

    others = tuple(kind for kind in lists.BaseListVariable.__subclasses__() if kind is not lists.RangeVariable)
    with (
        mock.patch.object(symbolic_convert, "BaseListVariable", others),
        _replaced(lists.RangeVariable, "sq_contains", contains),  # PyTorch 2.13's
        mock.patch.object(lists.RangeVariable, "call_method", call_method),  # before it
    ):
        yield


@contextlib.contextmanager
def _guarding_classes() -> Iterator[None]:
    """Guard constants that are read from classes, which Dynamo does of itself from PyTorch 2.13 on."""
    if torch.__version__ >= (2, 13):
        yield
        return
    from torch._dynamo import variables
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    read = variables.UserDefinedClassVariable.var_getattr
    constants = variables.ConstantVariable, getattr(variables, "EnumVariable", variables.ConstantVariable)

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        is_constant = isinstance(found, constants) and not name.startswith("__")
        if is_constant and found.source is None and self.source is not None:
            install_guard(AttrSource(self.source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
        return found

    with mock.patch.object(variables.UserDefinedClassVariable, "var_getattr", var_getattr):
        yield


@contextlib.contextmanager
def _leaving_caught_errors() -> Iterator[None]:
    """Leave code to eager that catches an error of an operation, or one that tells that something is missing.

    Dynamo follows the latter without a guard on the name, attribute or key: once that is there, the captured code goes
    on without it. Keys of dictionaries are guarded here, and these errors followed. From PyTorch 2.14 on it follows
    errors of operations on fake tensors, too, all as RuntimeErrors, also where the operation itself, such as one of the
    user's without a fake form, raises none.
    """
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import ConstDictVariable

    handle: Any = InstructionTranslatorBase.exception_handler
    get_item: Any = ConstDictVariable.getitem_const_raise_exception_if_absent
    kinds = (AttributeError, KeyError, LookupError, NameError, ImportError)
    left = tuple(map(exc.get_dynamo_observed_exception, kinds))
    if hasattr(exc, "FakeTensorObservedException"):
        left += (exc.FakeTensorObservedException,)
    no_key, no_element = map(exc.get_dynamo_observed_exception, (KeyError, IndexError))

    def get_guarded_item(self: Any, tx: Any, key: Any) -> Any:
        try:
            return get_item(self, tx, key)
        except no_key as error:
            self.install_dict_contains_guard(tx, [key])
            error.is_guarded = self.source is None or key.source is not None or key.is_python_constant()
            raise

    def exception_handler(self: Any, raised: Any) -> None:
        catches = self.block_stack if sys.version_info < (3, 11) else self.current_instruction.exn_tab_entry
        followed = (
            getattr(raised, "is_guarded", False)
            or _is_in(self.f_code, _FOLLOWED)
            or (isinstance(raised, no_element) and _is_in(self.f_code, _SEQUENCES))
        )
        if catches and isinstance(raised, left) and not followed:
            raise exc.Unsupported("an error is caught that depends on what is missing, or on an operation")
        handle(self, raised)

    with (
        mock.patch.object(InstructionTranslatorBase, "exception_handler", exception_handler),
        mock.patch.object(ConstDictVariable, "getitem_const_raise_exception_if_absent", get_guarded_item),
    ):
        yield


def _is_in(code: types.CodeType, places: Iterable[str]) -> bool:
    return any(place in code.co_filename for place in places)


def _leaving_generators() -> Any:
    """Break graphs where an existing `random.Random` is used: Dynamo would draw what the captured call draws."""
    from torch._dynamo.variables import RandomVariable

    return mock.patch.object(RandomVariable, "is_supported_random_obj", staticmethod(lambda generator: False))


_CORRECTIONS = (
    *(_refusing_gradient_modes, _finding_numbers, _comparing_numbers, _formatting_numbers, _keeping_deques),
    *(_keeping_orders, _knowing_ranges, _guarding_classes, _leaving_caught_errors, _leaving_generators),
)
