"""A user's function with its options: traced, planned and compiled for each signature of arguments."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from ..devices import Device
from ..plan.build import build
from ..plan.plan import Plan
from ..plan.traced import Traced
from ..settings import (
    DEFAULT_WORKSPACE,
    Settings,
    check_flag,
    check_precision,
    check_workspace,
    current_precision,
    plans_are_forced,
    settings_of_call,
)
from ..trace import NumbersOfCall, fail
from . import arrays, lazy
from .as_written import AsWritten
from .cache import PlanCache
from .call import Prepack, Runnable, contains_tracer, deferred, device_of, engine_for, tracer_in
from .code import package_of
from .environment import Environment
from .inline_cache import InlineCache
from .parameters import Parameters
from .signature import Signature
from .tracing import Tracing, trace_function
from .walk import TracedArgument

_instances: weakref.WeakSet[PlannedFunction] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace the locks in a forked process, which may have inherited them held by a thread of its parent."""
    for fused in list(_instances):
        fused._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


NOT_GIVEN: Any = inspect.Parameter.empty  # the target of the results of a call that gives none


def _names_of(static: Iterable[str]) -> frozenset[str]:
    """Return the names in `static`, or raise if it holds something else; the first call checks what they name."""
    names = isinstance(static, Iterable) and not isinstance(static, str)
    if not names or not all(isinstance(name, str) for name in static):
        raise TypeError(f"static: expected a tuple of names, got {static!r}")
    return frozenset(static)


class PlannedFunction:
    """A function, its signature, and the options of its plans.

    Attributes
    ----------
    parameters : Parameters
        The function's.
    names : tuple of str
        Of its parameters.
    environment : Environment
        The variables around the function.
    inline_cache : InlineCache
        Recognises calls like earlier ones.
    """

    # The `__dict__` is left to the attributes that users give to a function.
    # fmt: off
    __slots__ = (
        "__dict__", "__weakref__", "_keep_halves", "_lock", "_max_workspace", "_precision", "_runnables", "_strict",
        "environment", "has_out", "inline_cache", "names", "parameters",
    )
    # fmt: on

    def __init__(
        self,
        function: Callable[..., Any],
        precision: str | None = None,
        max_workspace: int = DEFAULT_WORKSPACE,
        keep_halves: bool = True,
        strict: bool = False,
        static: Iterable[str] = (),
    ):
        functools.update_wrapper(cast(Any, self), function)
        self.__wrapped__ = function
        self.parameters = Parameters(function)
        self.names = self.parameters.names
        self.has_out = "out" in self.names
        package = package_of(getattr(function, "__module__", None))
        self.environment = Environment(function, _names_of(static), package, self.names)
        self._precision = None if precision is None else check_precision(precision)
        self._max_workspace = check_workspace(max_workspace)
        self._keep_halves = check_flag("keep_halves", keep_halves)
        self._strict = check_flag("strict", strict)
        self._runnables = PlanCache()
        self.inline_cache = InlineCache(self.environment, self.names, settings=self.settings_of_call)
        self._lock = threading.RLock()
        _instances.add(self)

    @property
    def precision(self) -> str:
        """Precision of float32 products: the function's own, else that of the surrounding `with` block."""
        return self._precision or current_precision()

    @property
    def call_settings(self) -> tuple[str, str, bool]:
        """What the key of a call consists of beside its signature: `settings_of_call`."""
        return settings_of_call(self._precision)

    @property
    def settings_of_call(self) -> Callable[[], tuple[str, str, bool]]:
        """A function that returns `call_settings`."""
        return functools.partial(settings_of_call, self._precision)

    @property
    def product_settings(self) -> tuple[str, str]:
        """The settings by which matrix products are chosen: precision, and `Settings.epilogues`."""
        return self.call_settings[:2]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that calls have made and that are cached, the newest last."""
        return tuple(runnable.plan for runnable in self._runnables.values())

    def settings(self, device: Device | None, on_gpu: bool = False) -> Settings:
        """Return the settings of a plan for a GPU, one without an entry with `on_gpu`, or for none."""
        precision, epilogues = self.product_settings
        return Settings(precision, device, self._max_workspace, self._keep_halves, epilogues, on_gpu)

    def __repr__(self) -> str:
        return f"<fused {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

    @property
    def signature(self) -> inspect.Signature:
        """The function's signature, with the default values that it has now."""
        return self.parameters.signature

    def given_out(self, out: Any, kwargs: dict[str, Any]) -> Any:
        """Return the target of the results that a call gives by `out=`, or None.

        A function with a parameter `out` takes it as that one, which is added to the other arguments by name.
        """
        if out is NOT_GIVEN:
            return None
        if self.has_out:
            kwargs["out"] = out
            return None
        return out

    def call_refused(self, error: Exception, values: Sequence[Any], out: Any) -> Any:
        """Call with values that a signature refuses: traced or lazy arrays; raise the error where there are none.

        Another check may fail before the walk meets such an array.
        """
        if type(error) is TracedArgument or any(map(contains_tracer, values)):
            return self._inline(values, out)
        if any(map(lazy.contains_lazy, values)):
            return lazy.call(self, values, out)
        raise error

    def call_without_arrays(self, values: Sequence[Any], out: Any) -> Any:
        """Call the function itself: neither the values nor the variables around it hold an array to be fused."""
        if out is not None:
            raise TypeError("out: no argument is an array, so the function itself is called; assign what it returns")
        return AsWritten(self.__wrapped__, self.parameters)(values)

    def _inline(self, values: Sequence[Any], out: Any) -> Any:
        """Call the plain function within the trace of another fused function; refuse `out`."""
        for value in values:
            if (traced := tracer_in(value)) is not None:
                traced._trace.numpy_only = False
        if out is not None:
            fail(f"the call of {self!r} with out=", "inside another fused function its results are values, not arrays")
        return self.parameters.call(self.__wrapped__, values)

    def signature_of(self, values: Sequence[Any], specs: bool = False, by_value: Container[str] = ()) -> Signature:
        """Return the signature of a call, given the value of each parameter.

        `specs` allows specs in the place of arrays; `by_value` names the parameters whose numbers are constants.
        """
        signature = self.environment.new_signature(specs)
        for name, value in zip(self.names, values, strict=True):
            self.add_argument(signature, value, name, name in by_value)
        self.environment.add_to(signature)
        return signature

    def add_argument(self, signature: Signature, value: Any, name: str, by_value: bool = False) -> None:
        """Add an argument to a signature; with `by_value`, numbers in it are constants."""
        if name in self.environment.static:
            signature.add_static(value, name)
        elif by_value:
            signature.add_by_value(value, name)
        else:
            signature.add(value, name)

    def trace(self, values: Sequence[Any]) -> Traced:
        """Trace the function for the value of each parameter, with arrays or specs."""
        return self.trace_floats(values, self.signature_of(values, specs=True)).traced

    def _trace(
        self,
        values: Sequence[Any],
        signature: Signature,
        for_shards: bool = False,
        opened: Container[int] = (),
        branches: bool = True,
        arrays: bool = False,
        closed: bool = False,
    ) -> Tracing:
        environment, parameters, strict = self.environment, self.parameters, self._strict
        numbers = NumbersOfCall(signature.numbers, opened, branches, signature.changing, arrays, closed)
        return trace_function(environment, parameters, values, signature, strict, numbers, for_shards)

    def _trace_open(
        self,
        cache: PlanCache,
        key: Hashable,
        values: Sequence[Any],
        signature: Signature,
    ) -> Tracing:
        """Trace the function with constants that change from call to call open, where it lets them be its numbers.

        These are integers, and numbers around functions. What the function does has to be what it does with constants.
        So are arrays that it makes of floats which change: they are traced.
        Parameters as for `compile`.
        """
        branches = not cache.is_full(key)
        traced = self.trace_floats(values, signature, branches)
        asks_for_types = self.environment.asks_for_types(signature)
        arrays = traced.numbers.makes_arrays and branches and cache.traces_arrays(key) and not asks_for_types
        if arrays:
            found = self._attempt(values, signature, arrays=True)
            arrays = found is not None and found.numbers.read < traced.numbers.read
            if found is None or not arrays:
                cache.note_arrays(key)
            else:
                traced = found
        opened = cache.candidates(key, signature.numbers, signature.changing) if branches else frozenset()
        if not opened or asks_for_types:
            return traced

        def attempt(positions: frozenset[int]) -> Tracing | None:
            found = self._attempt(values, signature, positions, arrays)
            return found if found is not None and found.does_the_same(traced) else None

        accepted, best = opened, attempt(opened)
        if best is None:
            accepted = frozenset()
            for position in sorted(opened) if len(opened) > 1 else ():
                found = attempt(accepted | {position})
                accepted, best = (accepted, best) if found is None else (accepted | {position}, found)
        read = opened - accepted if best is None else (opened - accepted) | best.numbers.read
        cache.note(key, opened, read)
        return traced if best is None else best

    def trace_floats(
        self, values: Sequence[Any], signature: Signature, branches: bool = True, for_shards: bool = False
    ) -> Tracing:
        """Trace the function with floats among its arguments traced, or where that fails with all numbers as constants.

        Code that is not followed, such as that of `json` and `statistics`, takes no others than Python's own. Where the
        second trace fails, too, its error is raised: no traced number is its reason.
        """
        try:
            return self._trace(values, signature, for_shards, branches=branches)
        except Exception:  # of any kind: what that code raises
            if not any(type(number) is float for number in signature.numbers):
                raise
        return self._trace(values, signature, for_shards, closed=True)

    def _attempt(
        self, values: Sequence[Any], signature: Signature, opened: Container[int] = (), arrays: bool = False
    ) -> Tracing | None:
        """Trace the function with more traced than it may take; None where it fails."""
        try:
            return self._trace(values, signature, opened=opened, arrays=arrays)
        except Exception:  # of any kind: with these numbers the user's own code fails, as where it needs an int
            return None

    def plan_for(
        self, values: Sequence[Any], default: str, constants: Container[str], bound: frozenset[int] = frozenset()
    ) -> Plan:
        """Return the plan for values that may include specs; for arrays on no GPU, on the GPU named `default`.

        `constants` names the parameters that are bound or take their defaults, whose numbers are constants; `bound` is
        as in `compile`.
        """
        signature = self.signature_of(values, specs=True, by_value=constants)
        tracing = self.trace_floats(values, signature)
        leaves = [*signature.leaves, *tracing.constants]
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
        plan = build(tracing.traced, layouts, self.settings(device_of(signature.leaves, default)), bound)
        self._set_as_written(plan, tracing, signature)
        return plan

    def _set_as_written(self, plan: Plan, tracing: Tracing, signature: Signature) -> None:
        """Set `plan.as_written` to the reason why the function runs as written, if there is one."""
        plain = all(type(leaf) is np.ndarray for leaf in signature.leaves) and not signature.originals
        if not plain or self.environment.is_own:
            return
        if caught := tracing.traced.caught:
            plan.as_written = f"it catches what {caught} raises for some values, which a plan cannot"
        elif not plans_are_forced():
            from ..engines.host_time import reason_to_run_as_written

            plan.as_written = reason_to_run_as_written(plan, tracing.traced)

    def compile(
        self,
        cache: PlanCache,
        key: Hashable,
        values: Sequence[Any],
        signature: Signature,
        read_again: Callable[[], Signature],
        bound: frozenset[int] = frozenset(),
        prepack: Prepack | None = None,
    ) -> Runnable:
        """Trace, plan and compile the function for a new signature of arguments, and cache the result.

        It is not cached if another thread has changed arguments or variables meanwhile, other than numbers that change
        from call to call: the trace may have read the one or the other.

        Parameters
        ----------
        cache : PlanCache
            Gets the result under `key`.
        key : hashable
            Of the call.
        values : sequence
            The value of each parameter.
        signature : Signature
            Of the call.
        read_again : callable
            Returns the signature of the call as its arguments and variables are now.
        bound : frozenset of int
            Positions of bound arrays among the signature's leaves.
        prepack : callable, optional
            Computes the values that depend on bound arrays alone.
        """
        with self._lock:
            found = cache.find(key, signature.numbers)
            if found is not None:
                return found
            engine = engine_for(signature.leaves, signature.names)
            tracing = self._trace_open(cache, key, values, signature)
            created = [arrays.on_device_of(signature.leaves[0], c) for c in tracing.constants]
            leaves = [*signature.leaves, *created]
            layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
            settings = self.settings(device_of(leaves), arrays.is_cupy(leaves[0]))
            plan = build(tracing.traced, layouts, settings, bound)
            self._set_as_written(plan, tracing, signature)
            if plan.as_written:
                as_written = AsWritten(self.__wrapped__, self.parameters, tracing.traced.at_risk)
                execute = deferred(engine, plan, prepack)
                runnable = Runnable(plan, tracing.results, execute, created, as_written, tracing.depends)
            else:
                kept = [*created, *(prepack(plan.prepare, leaves, engine) if prepack and plan.prepare else [])]
                execute = engine(plan, [*signature.leaves, *kept])
                runnable = Runnable(plan, tracing.results, execute, kept, depends=tracing.depends)
            if _is_still(signature, read_again):
                cache.add(key, signature.numbers, runnable)
            return runnable


def _is_still(signature: Signature, read_again: Callable[[], Signature]) -> bool:
    """Whether a call has the key that it had when its signature was made."""
    try:
        return read_again().cache_key() == signature.cache_key()
    except TypeError:  # an argument or a variable is of another type now, which is refused
        return False
