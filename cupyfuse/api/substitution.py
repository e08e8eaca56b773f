"""Substitute traced arrays for arrays in arguments and around functions.

The walk is in the order of `Signature`, which numbers the arrays.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..trace import NumbersOfCall, Trace, Tracer, traced_number
from ..trace.numpy import REPLACED_BUILTINS, REPLACED_TYPES, SCALAR_CONVERTERS, replacement_of
from . import arrays
from .call_sites import name_where_called, scalar_types_called, with_calls_apart
from .code import reads_of
from .constants import NUMBERS, constant_key
from .members import MISSING
from .objects import HeldObject, Unread, delete_attribute, empty_like, names_of, set_attribute
from .places import MixedUp, Places
from .refusals import describe_refusal
from .registry import registration
from .signature import Signature
from .structures import DEEPEST, attributes_of, structure_of, with_attributes_of
from .variables import CachedFunction, defaults_of, is_known, is_library_function, read_by_attribute, variables_of


def _cached_but_for_traced(cached: Any) -> Any:
    """Return a function cached by `functools`, called without its cache for numbers whose values are not known."""

    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_traced = any(type(v) is Tracer and (v._is_scalar or v._is_python) for v in (*args, *kwargs.values()))
        return (cached.__wrapped__ if is_traced else cached)(*args, **kwargs)

    call.__dict__.update(
        __wrapped__=cached.__wrapped__,
        cache_info=cached.cache_info,
        cache_clear=cached.cache_clear,
        cache_parameters=cached.cache_parameters,
    )
    return call


class Substitution:
    """Rebuilds arguments and functions with traced arrays for the arrays that they hold.

    Mutable containers are always rebuilt, so that tracing changes none of the user's.

    Parameters
    ----------
    trace : Trace
    signature : Signature
        Of the arguments and of what is around the function.
    traced : sequence of Tracer
        Those of the signature's leaves.
    static : frozenset of str
        Names of variables that stay as they are.
    package : str
        The user's package, whose functions are rebuilt.
    numbers : NumbersOfCall
        Its float and integer arguments.
    """

    def __init__(
        self,
        trace: Trace,
        signature: Signature,
        traced: Sequence[Any],
        static: frozenset[str],
        package: str,
        numbers: NumbersOfCall,
    ):
        self._trace = trace
        self._leaves, self._traced = signature.leaves, traced
        self._places = Places(signature)
        self._held = {id(held.value): held for held in signature.objects}
        # The user's objects that the trace reads itself: somewhere, and so everywhere, since the function finds them to
        # be one object; the signature found no arrays in them. Those without attributes, too.
        kept = [held for held in signature.objects if not held.rebuilt or not names_of(held.value)]
        self._kept = [(h, type(h.value), dict(attributes_of(h.value))) for h in kept]
        self._objects = {id(held.value): held.value for held in kept}  # what stands for objects, by their ids
        self._depth = 0  # of objects within objects
        self._captured, self._static, self._package = signature.captured, static, package
        self._functions: dict[types.FunctionType, types.FunctionType] = {}  # rebuilt functions
        self._globals: dict[int, dict[str, Any]] = {}  # rebuilt globals, by the ids of the user's
        self._cells: dict[int, Any] = {}  # rebuilt closure cells, by the ids of the user's
        self._seen: set[tuple[int, str]] = set()  # variables that were substituted
        self._rebuilt: list[tuple[str, Any, _State]] = []  # name, container or object, what it held
        self._taken = 0  # arrays that were substituted
        self._numbers = numbers

    def _tracer_of(self, array: Any) -> Any:
        """Return the tracer of the next array, which has to be the one that the signature found there."""
        place = self._places.next_leaf()
        leaf, tracer = self._leaves[place], self._traced[place]
        self._taken += 1
        # Other libraries' arrays were exchanged, and a registered type's `flatten` may make its own anew, of one form.
        same_library = type(leaf) is type(array)
        if same_library and leaf is not array and (leaf.shape != array.shape or leaf.dtype != array.dtype):
            raise MixedUp
        return tracer

    def check_complete(self) -> None:
        """Raise an error if the signature found arrays that were not substituted."""
        if self._taken < len(self._leaves):
            raise MixedUp

    def value(self, value: Any, name: str) -> Any:
        """Return a value with traced arrays for the arrays in it, and traced numbers for numbers."""
        cls = type(value)
        if cls is np.ndarray:
            return self._tracer_of(value)
        if cls in NUMBERS:
            place = self._places.next_number()
            return value if place is None else traced_number(self._numbers, place, name, self._trace)
        if id(value) in self._held:
            return self._object(self._held[id(value)])
        if (replacement := replacement_of(value)) is not None:
            return replacement
        if constant_key(value) is not None or isinstance(value, (type, types.ModuleType)):
            return value
        if cls is types.FunctionType:
            return self.function(value)
        if cls is CachedFunction:
            rebuilt = functools.lru_cache(**value.cache_parameters())(self.value(value.__wrapped__, name))
            return with_attributes_of(value, _cached_but_for_traced(rebuilt))
        if arrays.is_array(value):
            return self._tracer_of(value)
        structure = structure_of(value)
        if structure is None:  # the `flatten` of a registered type made another object than the signature found
            raise TypeError(f"argument {name!r}: {describe_refusal(value, name)}")
        children = [self.value(c, name + label) for label, c in zip(structure.labels, structure.children, strict=True)]
        if not structure.mutable and all(a is b for a, b in zip(children, structure.children, strict=True)):
            return value
        rebuilt = structure.rebuild(children)
        if structure.mutable:
            self._rebuilt.append((name, rebuilt, _State(structure.key, structure.labels, children)))
        return rebuilt

    def _object(self, held: HeldObject) -> Any:
        """Return what stands for one of the user's objects in every place."""
        found = self._objects.get(id(held.value))
        if found is not None:
            return found
        if self._depth > DEEPEST:
            raise TypeError(f"{held.subject} {held.name!r}: objects within objects, more than {DEEPEST} levels deep")
        self._depth += 1
        rebuilt = self._objects[id(held.value)] = empty_like(held.value)  # before its attributes, which may hold it
        for label, value in attributes_of(held.value):
            name, span = f"{held.name}.{label}", held.spans.get(label)
            if span is None:
                part: Any = Unread(self._why_unread(value, held.subject, name))
            else:
                with self._places.within(span):
                    part = self.value(value, name)
            set_attribute(rebuilt, label, part)
        self._depth -= 1
        self._rebuilt.append((held.name, rebuilt, _state_of_object(rebuilt)))
        return rebuilt

    def _why_unread(self, value: Any, subject: str, name: str) -> str:
        """Return the error message for uses of an attribute that the signature does not have."""
        if not is_known(value, self._package):
            return f"{subject} {name!r}: {describe_refusal(value, name)}"
        return (
            f"{name!r} is read by a name that the function's code does not have, as by vars(), getattr() with a "
            "computed name, or a library; a fused function cannot tell when it changes: read it as an attribute, or "
            "pass it as an argument"
        )

    def fused_function(self, function: Any) -> Any:
        """Return the fused function itself, rebuilt; its default values are among the arguments."""
        if (replacement := replacement_of(function)) is not None:
            return replacement
        if isinstance(function, types.FunctionType):
            return self.function(function, defaults=False)
        return self._around(function, "fn", function)

    def function(self, function: types.FunctionType, defaults: bool = True) -> types.FunctionType:
        """Return a function with substituted closure cells and globals, and default values if `defaults`."""
        if function in self._functions:
            return self._functions[function]
        if not self._captured or is_library_function(function, self._package):
            return function
        cells = tuple(self._cells.setdefault(id(c), types.CellType()) for c in function.__closure__ or ())
        code, namespace = self._code_and_globals(function)
        rebuilt = types.FunctionType(code, namespace, function.__name__, function.__defaults__, cells)
        functools.update_wrapper(rebuilt, function)
        rebuilt.__kwdefaults__ = function.__kwdefaults__
        self._functions[function] = rebuilt  # before its variables, which may hold the function itself
        if defaults:
            self._substitute_defaults(function, rebuilt)
        self._substitute_variables(function)
        return rebuilt

    def _code_and_globals(self, function: types.FunctionType) -> tuple[types.CodeType, dict[str, Any]]:
        """Return the code and the rebuilt globals of a function, in which replacements stand for some builtins.

        One dict of globals serves all functions of a module, since types of numbers have names of their own where they
        are called.
        """
        reads, own = reads_of(function.__code__), function.__globals__
        namespace = self._globals.get(id(own))
        if namespace is None:
            namespace = self._globals[id(own)] = dict(own)
        builtins = {label for label in reads.globals if label not in own}
        types_called = frozenset(builtins & reads.called & REPLACED_TYPES.keys())
        namespace.update({label: REPLACED_BUILTINS[label] for label in builtins & REPLACED_BUILTINS.keys()})
        namespace.update({name_where_called(label): REPLACED_TYPES[label] for label in types_called})
        # What NumPy's attributes are loaded as, `kept_functions` has added to NumPy.
        own_scalars, of_numpy = scalar_types_called(own, reads)
        namespace.update({name_where_called(label): SCALAR_CONVERTERS[own[label]] for label in own_scalars})
        return with_calls_apart(function.__code__, types_called | own_scalars, of_numpy), namespace

    def _around(self, holder: Any, label: str, value: Any) -> Any:
        """Return the substituted value of a variable or a default."""
        with self._places.within_variable(holder, label):
            return self.value(value, label)

    def _substitute_defaults(self, function: types.FunctionType, rebuilt: types.FunctionType) -> None:
        """Give a rebuilt function the substituted default values of the user's."""
        if function.__defaults__ or function.__kwdefaults__:
            values = [self._around(function, label, value) for label, value in defaults_of(function)]
            count = len(function.__defaults__ or ())
            rebuilt.__defaults__ = tuple(values[:count])
            rebuilt.__kwdefaults__ = dict(zip(function.__kwdefaults__ or (), values[count:], strict=True))

    def _substitute_variables(self, function: types.FunctionType) -> None:
        """Substitute the closure cells and globals that a function reads."""
        for holder, label, value in variables_of(function):
            if (id(holder), label) in self._seen:
                continue
            self._seen.add((id(holder), label))
            if value is MISSING:
                continue
            if label not in self._static and not read_by_attribute(value, self._package):
                value = self._around(holder, label, value)
            if isinstance(holder, dict):
                self._globals[id(holder)][label] = value
            else:
                self._cells[id(holder)].cell_contents = value

    def changed_container(self) -> str | None:
        """Return the name of a rebuilt container or object that the function changed in place; None if none was."""
        for name, rebuilt, before in self._rebuilt:
            structure = None if before.key is None else structure_of(rebuilt)
            after = _state_of_object(rebuilt) if structure is None else _State(*structure[:3])
            was = _without_cached_properties(rebuilt, before)
            now = _without_cached_properties(rebuilt, after)
            may_be_new = registration(type(rebuilt)) is not None  # its `flatten` may create containers in each call
            if was.keys() != now.keys() or not all(_same(now[label], was[label], may_be_new) for label in was):
                return name
            # The key has the names of attributes, also of cached properties, which may be computed at any time.
            has_cached_properties = len(was) < len(before.children) or len(now) < len(after.children)
            if not has_cached_properties and after.key != before.key:
                return name
        return None

    def restore(self) -> str | None:
        """Give the user's objects that the trace read itself their classes and attributes again.

        What lists in them hold is not restored, nor are results of cached properties kept, as plans compute them anew.
        Returns the name of an object that was changed; None if none was.
        """
        found = None
        for held, cls, before in self._kept:
            value, now = held.value, dict(attributes_of(held.value))
            changed = [label for label in before if label not in now or now[label] is not before[label]]
            added = now.keys() - before.keys()
            if type(value) is not cls or changed or not all(_is_cached_property(cls, label) for label in added):
                found = held.name
            if type(value) is not cls:
                object.__setattr__(value, "__class__", cls)
            for label in added:
                delete_attribute(value, label)
            for label in changed:
                set_attribute(value, label, before[label])
        return found


class _State(NamedTuple):
    """What a container or an object holds: a container's key, None of an object; children and their labels."""

    key: Any
    labels: Sequence[str]
    children: Sequence[Any]


def _state_of_object(value: Any) -> _State:
    attributes = list(attributes_of(value))
    labels = [".__class__", *(f".{name}" for name, _ in attributes)]
    return _State(None, labels, [type(value), *(child for _, child in attributes)])


def _without_cached_properties(value: Any, state: _State) -> dict[str, Any]:
    """Return the children of an object by label, without the results of cached properties."""
    cls = type(value)
    return {
        label: child
        for label, child in zip(state.labels, state.children, strict=True)
        if not _is_cached_property(cls, label[1:])
    }


def _is_cached_property(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), functools.cached_property)


def _same(a: Any, b: Any, may_be_new: bool) -> bool:
    """Whether two children are one object or equal constants; or are of one type, if containers may be new ones."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) is Unread:
        return False
    key = constant_key(a)
    if key is not None:
        return key == constant_key(b)
    return may_be_new and structure_of(a) is not None
