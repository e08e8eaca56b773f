"""`fuse`: a module with the same parameters, in which chains of operations run through cupyfuse.

A fused module is of a class made for it, a subclass of the original's, and shares the original's parameters and
buffers. Dynamo captures its forward (`capture`); chains of the captured graph that are worth it are exchanged for calls
(`backend`), and the rest runs as PyTorch runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ..settings import DEFAULT_WORKSPACE, check_precision, check_prepared, check_workspace
from .chains.runner import Options
from .copies import exchanged, slots
from .distributed import adopt, flattens
from .explain import explain

M = TypeVar("M", bound=torch.nn.Module)
# What a module has of its own, and shares with no copy.
_OWN = ("_parameters", "_buffers", "_modules", "_cupyfuse", "_compiled_call_impl")


@dataclass(frozen=True)
class _Choices:
    """What `fuse` was asked for, as a copy of a fused module is asked for it again."""

    options: Options
    graphs: bool


def refresh(module: torch.nn.Module) -> None:
    """Have a fused module prepare anew, at its next call, what it has prepared from weights.

    Nothing is kept on the CPU, and on a GPU every call looks for changes by itself: it is told of those that PyTorch
    counts, of optimizers' steps and of gradients, and compares a sample of each row with what it was. Needed only after
    writing a few elements of a large matrix through `parameter.data` or from outside PyTorch, by hand; after writing a
    few elements in any way, before a captured graph is replayed; and after changes through `parameter.data` of a module
    that was fused with `frozen=True`.
    """
    for part in module.modules():
        captured = part.__dict__.get("_cupyfuse")
        for runner in captured.runners if captured is not None else ():
            runner.refresh()


class OfferedMethod:
    """A function of a module as a method of fused ones, as long as nothing of the user's has its name."""

    def __init__(self, function: Callable[..., Any]):
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

    _cupyfuse_original: ClassVar[type[torch.nn.Module]]

    explain = OfferedMethod(explain)
    refresh = OfferedMethod(refresh)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Classes that `fuse` makes are nothing that the user's code asked for.
        if "_cupyfuse_original" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Tensors move to another device or dtype: nothing prepared from the old ones should keep memory.
        for runner in self.__dict__["_cupyfuse"].runners:
            runner.release()
        return super()._apply(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the original class, which can be found by name.
        captured = self.__dict__["_cupyfuse"]
        attributes = {k: v for k, v in self.__dict__.items() if k not in ("_cupyfuse", "_compiled_call_impl")}
        choices = _Choices(captured.options, captured.graphs)
        return _rebuild, (self._cupyfuse_original, choices, slots(self)), attributes

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # A replica lives for one call, on a thread of its own: not worth a capture.
        replica.__dict__["_compiled_call_impl"] = None
        return replica


def _rebuild(original: Any, choices: _Choices, held: dict[str, Any]) -> Any:
    module: Any = object.__new__(fused_class(original))
    for name, value in held.items():
        object.__setattr__(module, name, value)
    _begin(module, choices)
    return module


def _begin(module: Any, choices: _Choices) -> None:
    """Let calls of a module be captured."""
    from .capture import Capture  # it imports Dynamo

    captured = Capture(choices.options, choices.graphs)
    module.__dict__["_cupyfuse"] = captured
    module.__dict__["_compiled_call_impl"] = captured.compile(module)


@functools.cache
def fused_class(original: Any) -> Any:
    """The class of fused modules of a class: a subclass of it, with its name."""
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_cupyfuse_original": original,
    }
    # What the user's class calls so stays the user's; `cupyfuse.torch.explain` and `refresh` reach every module.
    names.update({name: getattr(original, name) for name in ("explain", "refresh") if hasattr(original, name)})
    return type(original)(original.__name__, (FusedModule, original), names)


@functools.cache
def _unfused(kind: Any) -> Any:
    """The class of which a fused module is; also beneath a class that `fully_shard` has made of a fused one."""
    if "_cupyfuse_original" in vars(kind):
        return kind._cupyfuse_original
    if not issubclass(kind, FusedModule):
        return kind
    names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(map(_unfused, kind.__bases__)), names)


def fuse(
    module: M,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
    frozen: bool = False,
    graphs: bool = False,
    only_gains: bool = True,
    max_prepared: int | None = None,
) -> M:
    """A module that computes the same, with every chain that gains by it running through cupyfuse.

    The module's forward is captured by Dynamo, as `torch.compile` does it, when it is called with arguments of a new
    kind; chains of operations that a cost model expects to gain run fused, the rest as PyTorch runs it.

    Parameters
    ----------
    module : torch.nn.Module
        Not changed; the fused module shares its parameters and buffers. Its submodules are copied, so that modes such
        as `eval()` are set apart.
    precision : {"highest", "high", "medium", "ieee", "tf32"}, optional
        Of float32 products; PyTorch's `torch.get_float32_matmul_precision()` unless given.
    max_workspace : int
        Bytes that a chain may take beside its arguments and results, where it can run in blocks of rows.
    keep_halves : bool
        Whether the fp16 hi/lo split of float32 weights is kept from call to call, as much memory again as the weights.
    frozen : bool
        The caller's promise that no weight changes: what is prepared from weights is kept without a check.
    graphs : bool
        Whether calls run as CUDA graphs: one launch a captured graph, for inputs of fixed shapes.
    only_gains : bool
        Whether chains that the cost model expects to lose are left to PyTorch.
    max_prepared : int, optional
        Bytes of what may be kept of weights from call to call (hi/lo splits, sums), first come, first kept; 0 keeps
        nothing. Without it, each chain may keep up to a quarter of the GPU's memory that is free at its first call.

    Returns
    -------
    torch.nn.Module
        Of a subclass of the module's class, with the same parameters, buffers, hooks and names. It has two methods
        more: `explain()` tells what was fused and why the rest was not, `refresh()` has weights prepared anew.

    Raises
    ------
    TypeError
        `module` is not a module, or one whose code is not Python's (TorchScript).
    ValueError
        `precision` is not one of the names, `max_workspace` is not positive, or `max_prepared` is negative.
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
        frozen=bool(frozen),
        only_gains=bool(only_gains),
        max_prepared=check_prepared(max_prepared),
    )
    done: dict[int, Any] = {}
    fused: M = _cloned(module, done, root=True)
    for part in done.values():
        for key, value in list(part.__dict__.items()):
            if key not in _OWN:
                part.__dict__[key] = exchanged(value, done)
    _begin(fused, _Choices(options, bool(graphs)))
    return fused


def _cloned(module: Any, done: dict[int, Any], root: bool = False) -> Any:
    """A module tree of new objects, which share parameters, buffers and hooks with the original ones."""
    if id(module) in done:
        return done[id(module)]
    whole = isinstance(module, (torch.jit.ScriptModule, torch.nn.modules.lazy.LazyModuleMixin))
    if whole or (flattens(module) and not root):
        done[id(module)] = module
        return module
    kind: Any = type(module)
    original = _unfused(kind)
    made: Any = object.__new__(fused_class(original) if root else original)
    done[id(module)] = made
    made.__dict__.update(module.__dict__)
    made.__dict__.pop("_cupyfuse", None)
    made.__dict__["_compiled_call_impl"] = None
    for name, value in slots(module).items():
        object.__setattr__(made, name, value)
    adopt(module, made)
    if flattens(module):
        return made
    children = {name: None if c is None else _cloned(c, done) for name, c in module._modules.items()}
    made.__dict__["_modules"] = children
    return made
