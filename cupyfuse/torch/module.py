"""`fuse`: a module with the same parameters, in which chains of operations run through cupyfuse.

A fused module is of a class made for it, a subclass of the original's. It shares the original's dictionaries of
parameters and buffers, so that both always see the same tensors; its submodules are fused in turn. When it is called
with arguments of a new kind, its forward is recorded once (`record`), cut into chains (`partition`) and made one
function (`program`), which then runs for as long as everything that the forward can have read is as it was (`guards`).
A module whose chains all lie within submodules, and one that cannot be recorded, runs its own Python code, and leaves
the rest to those submodules.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from ..settings import DEFAULT_WORKSPACE, check_precision, check_workspace
from .copies import exchanged, slots
from .entry import Options
from .explain import explain
from .guards import Guard, globally_hooked
from .kinds import kind_of, quick_test
from .modes import elsewhere
from .partition import Partition, partition
from .program import Program
from .reach import OWN
from .record import Record, Refused, Submodule, shares_memory
from .recorder import record
from .running import Runner

M = TypeVar("M", bound=torch.nn.Module)
_MOST_VARIANTS = 256
_is_compiling = torch.compiler.is_compiling


@dataclass
class Variant:
    """What is done for arguments of one kind.

    Attributes
    ----------
    program : Program or None
        None where the module's own code runs.
    guard : Guard
    reason : str
        Why the module's own code runs.
    partition : Partition or None
        What there is to explain.
    fits, call : callable
        A quick test of arguments, None where there is none; the program as a function of the tensors among them.
    """

    program: Program | None
    guard: Guard
    reason: str = ""
    partition: Partition | None = None
    fits: Any = None
    call: Any = None


@dataclass
class State:
    """What a fused module knows; it belongs to one module object, and is not copied with it."""

    owner: int
    options: Options
    variants: dict[Hashable, list[Variant]] = field(default_factory=dict)
    runners: dict[Hashable, Runner] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    last: Variant | None = None  # what the last call took, if a quick test can say that the next one takes it too

    def runner(self, fused: Any) -> Runner:
        key = fused.chain, torch.get_default_dtype()
        if key not in self.runners:
            self.runners[key] = Runner(fused.chain, self.options)
        return self.runners[key]


def refresh(module: torch.nn.Module) -> None:
    """Have a fused module prepare anew, at its next call, what it has prepared from weights.

    Nothing is kept on the CPU, and on a GPU every call looks for changes by itself: it is told of those that PyTorch
    counts, of optimizers' steps and of gradients, and compares a sample of each row with what it was. Needed only after
    writing a few elements of a large matrix through `parameter.data` or from outside PyTorch, by hand; after writing a
    few elements in any way, before a captured graph is replayed; and after changes through `parameter.data` of a module
    that was fused with `frozen=True`.
    """
    for part in module.modules():
        state = part.__dict__.get("_cupyfuse")
        for runner in list(state.runners.values()) if state is not None else ():
            runner.refresh()


class _Offered:
    """A function of a module as a method of fused ones, as long as nothing of the user's has its name."""

    def __init__(self, function: Callable[[torch.nn.Module], Any]):
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self.function
        for table in ("_parameters", "_buffers", "_modules"):
            if self.name in module.__dict__.get(table, ()):
                return module.__dict__[table][self.name]
        return functools.partial(self.function, module)


class FusedModule(torch.nn.Module):
    """What fused modules have beside their original class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or elsewhere():
            return self._cupyfuse_forward(*args, **kwargs)
        state: State | None = self.__dict__.get("_cupyfuse")
        if state is None or state.owner != id(self):
            state = self._cupyfuse_new(state)
        last = state.last
        if last is not None and not kwargs:
            try:
                same = last.fits(args) and last.guard.holds()
            except RuntimeError:  # a tensor without strides
                same = False
            if same:
                return last.call(*args)
        return _generally(self, state, args, kwargs)

    _cupyfuse_original: ClassVar[type[torch.nn.Module]]
    _cupyfuse_anonymous: ClassVar[bool] = False

    @property
    def _cupyfuse_forward(self) -> Callable[..., Any]:
        """The forward of the original class."""
        return functools.partial(self._cupyfuse_original.forward, self)

    def _cupyfuse_new(self, old: State | None) -> State:
        """A state of this object's own. A copy, such as a replica on another GPU, shares what is ready."""
        state = State(id(self), old.options if old is not None else Options())
        if old is not None:
            state.runners = old.runners
        self.__dict__["_cupyfuse"] = state
        return state

    explain = _Offered(explain)
    refresh = _Offered(refresh)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Classes that `fuse` makes are nothing that the user's code asked for.
        if "_cupyfuse_original" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Tensors move to another device or dtype: nothing prepared from the old ones should keep memory.
        state = self.__dict__.get("_cupyfuse")
        if state is not None:
            for runner in list(state.runners.values()):
                runner.release()
            self.__dict__["_cupyfuse"] = State(id(self), state.options)
        return super()._apply(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the class that can be found by name; this one, where it is not made by `fuse`.
        named = self._cupyfuse_original if type(self)._cupyfuse_anonymous else type(self)
        state = self.__dict__.get("_cupyfuse")
        attributes = {k: v for k, v in self.__dict__.items() if k != "_cupyfuse"}
        return _rebuild, (named, state.options if state is not None else Options(), slots(self)), attributes


def _rebuild(named: type[torch.nn.Module], options: Options, held: dict[str, Any]) -> Any:
    kind: Any = named if issubclass(named, FusedModule) else fused_class(named)
    module: Any = object.__new__(kind)
    module.__dict__["_cupyfuse"] = State(id(module), options)
    for name, value in held.items():
        object.__setattr__(module, name, value)
    return module


_classes: dict[Any, Any] = {}


def fused_class(original: Any) -> Any:
    """The class of fused modules of a class: a subclass of it, with its name."""
    if original not in _classes:
        _classes[original] = _made_class(original, anonymous=True)
    return _classes[original]


def _made_class(original: Any, anonymous: bool) -> Any:
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_cupyfuse_original": original,
        "_cupyfuse_anonymous": anonymous,
    }
    # What the user's class calls so stays the user's; `cupyfuse.torch.explain` and `refresh` reach every module.
    names.update({name: getattr(original, name) for name in ("explain", "refresh") if hasattr(original, name)})
    # A function of its own, for it to look like the user's.
    base = FusedModule.forward
    names["forward"] = functools.update_wrapper(types.FunctionType(base.__code__, base.__globals__), original.forward)
    return type(original)(original.__name__, (FusedModule, original), names)


def drop_in(original: type[M]) -> type[M]:
    """A module class whose instances are fused from the start."""
    made: type[M] = _made_class(original, anonymous=False)
    return made


# Variants -----------------------------------------------------------------------------------------------------------


def _generally(module: FusedModule, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with arguments of whatever kind."""
    tensors, key = kind_of(args, kwargs)
    if key is None:
        return module._cupyfuse_forward(*args, **kwargs)
    for variant in state.variants.get(key, ()):
        if variant.guard.holds():
            break
    else:
        variant = _vary(module, state, key, args, kwargs)
    if variant.program is None or globally_hooked() or (variant.program.writes and shares_memory(module, tensors)):
        return module._cupyfuse_forward(*args, **kwargs)
    if variant.fits is not None:
        state.last = variant
    return variant.call(*tensors)


def _vary(module: FusedModule, state: State, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
    """A variant for arguments of this kind, kept."""
    with state.lock:
        known = state.variants.setdefault(key, [])
        for variant in known:
            if variant.guard.holds():
                return variant
        variant = _made(module, state, args, kwargs)
        if variant.program is not None:
            variant.call = variant.program.call
            variant.fits = None if variant.program.writes else quick_test(args, kwargs)
        if sum(map(len, state.variants.values())) >= _MOST_VARIANTS:
            state.variants.clear()
            known = state.variants.setdefault(key, [])
        known.insert(0, variant)
        return variant


def _made(module: FusedModule, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
    leaves: set[str] = set()
    found: tuple[Record, Partition] | None = None
    while found is None:
        try:
            taken = record(module, module._cupyfuse_forward, args, kwargs, leaves)
            found = taken, partition(taken)
        except Refused as refused:
            if refused.path == "" or refused.path in leaves:
                return Variant(None, Guard(module), refused.reason)
            leaves.add(refused.path)
    taken, parts = found
    crossing = [_home(chain, taken) for chain in parts.chains]
    if not any(path == "" for path in crossing):
        within = sorted({p for p in crossing if p})
        reason = f"its chains are within {', '.join(within)}" if within else "it has no chain to fuse"
        return Variant(None, Guard(module, taken), reason, None if within else parts)
    needed = {"", *(p for chain, home in zip(parts.chains, crossing, strict=True) if home == ""
                    for p in _paths(chain, taken))}  # fmt: skip
    busy = {operation.path for operation in taken.operations}
    outer = {
        p for p in taken.inlined if p and not any(_within(n, p) for n in needed) and any(_within(b, p) for b in busy)
    }
    if outer:
        try:
            again = record(module, module._cupyfuse_forward, args, kwargs, leaves | outer)
            reasons = {taken.operations[k].path: reason for k, reason in parts.left.items()}
            taken, parts = again, partition(again)
            _tell(parts, reasons)
        except Refused:
            pass  # then all of it stays one program
    return Variant(Program(parts, module, state.runner), Guard(module, taken), "", parts)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def _tell(parts: Partition, reasons: dict[str, str]) -> None:
    """Say of modules that are called as they are why what is in them is not fused."""
    for k in parts.left:
        target = parts.record.operations[k].target
        if isinstance(target, Submodule):
            inside = [reason for path, reason in reasons.items() if _within(path, target.path)]
            parts.left[k] = inside[0] if inside else parts.left[k]


def _paths(chain: Any, taken: Record) -> set[str]:
    return {taken.operations[k].path for k in chain.members}


def _home(chain: Any, taken: Record) -> str:
    """The innermost module that all operations of a chain are in."""
    paths = [p.split(".") if p else [] for p in _paths(chain, taken)]
    shortest = min(paths, key=len)
    for depth in range(len(shortest), 0, -1):
        if all(p[:depth] == shortest[:depth] for p in paths):
            path = ".".join(shortest[:depth])
            if isinstance(taken.inlined.get(path), FusedModule):
                return path
    return ""


# The door -----------------------------------------------------------------------------------------------------------


def fuse(
    module: M,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
    frozen: bool = False,
) -> M:
    """A module that computes the same, with every chain that can be fused running through cupyfuse.

    Parameters
    ----------
    module : torch.nn.Module
        Any module; it is not changed.
    precision : {"highest", "high", "medium", "ieee", "tf32"}, optional
        Precision of float32 matrix products (see `cupyfuse.precision`). By default that of
        `torch.get_float32_matmul_precision`, at every call.
    max_workspace : int, optional
        Bytes that a chain may take beside its arguments and results, where it can work through blocks of rows.
    keep_halves : bool, optional
        Whether the fp16 halves of float32 weights are kept from call to call, as much memory again as the weights.
    frozen : bool, optional
        Your promise that parameters and buffers change in no way that PyTorch does not count (see `refresh`), as where
        a model is served: then nothing looks for such changes.

    Returns
    -------
    torch.nn.Module
        Of a subclass of the module's class, with the same parameters, buffers, hooks and names. It has two methods
        more: `explain()` tells what was fused and why the rest was not, `refresh()` is for the rare changes of weights
        that are not noticed.

    Raises
    ------
    TypeError
        `module` is not a module, or one whose code is not Python's (TorchScript).
    ValueError
        `precision` is not one of the names, or `max_workspace` is not positive.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module: expected a torch.nn.Module, got {type(module).__name__}; fuse functions with cupyfuse.fuse"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "module: expected a module written in Python, got a TorchScript module; fuse it before scripting"
        )
    options = Options(
        None if precision is None else check_precision(precision),
        check_workspace(max_workspace),
        bool(keep_halves),
        bool(frozen),
    )
    done: dict[int, Any] = {}
    fused: M = _fused(module, options, done, root=True)
    for part in done.values():
        for key, value in list(part.__dict__.items()):
            if key not in OWN:
                part.__dict__[key] = exchanged(value, done)
    return fused


def _fused(module: Any, options: Options, done: dict[int, Any], root: bool = False) -> Any:
    """A module whose code can be looked into as a fused one; submodules that are one operation as they are."""
    if id(module) in done:
        return done[id(module)]
    if isinstance(module, (torch.jit.ScriptModule, torch.nn.modules.lazy.LazyModuleMixin)):
        done[id(module)] = module
        return module
    single = type(module).__module__.startswith("torch.nn.modules.") and not module._modules
    named = isinstance(module, FusedModule) and not type(module)._cupyfuse_anonymous
    if named or (single and not root):
        kind: Any = type(module)
    else:
        kind = fused_class(module._cupyfuse_original if isinstance(module, FusedModule) else type(module))
    made: Any = object.__new__(kind)
    done[id(module)] = made
    made.__dict__.update(module.__dict__)
    for name, value in slots(module).items():
        object.__setattr__(made, name, value)
    if issubclass(kind, FusedModule):
        made.__dict__["_cupyfuse"] = State(id(made), options)
    children = {name: None if c is None else _fused(c, options, done) for name, c in module._modules.items()}
    made.__dict__["_modules"] = children
    return made
