"""`fuse`: a module with the same parameters, in which chains of operations run through cupyfuse.

A fused module is of a subclass of the original's class, and shares the original's parameters and buffers. Dynamo
captures its forward (`capture`); chains of the captured graph that gain are replaced by calls (`backend`), and the rest
runs as PyTorch runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ..settings import DEFAULT_WORKSPACE, check_flag
from .chains.options import Options
from .copies import replace_modules, slot_attributes
from .distributed import is_fsdp, share_state
from .explain import check_module, explain

M = TypeVar("M", bound=torch.nn.Module)
_CAPTURE = ("_cupyfuse", "_compiled_call_impl")  # the capture of a fused module, and the call that it compiled
# Attributes whose values a copy does not take from the original.
_UNSHARED = ("_parameters", "_buffers", "_modules", *_CAPTURE)
_COPY_METHODS = ("__copy__", "__deepcopy__")


@dataclass(frozen=True)
class _FuseArguments:
    """The arguments of `fuse`, for copies of the fused module."""

    options: Options
    graphs: bool

    @classmethod
    def of(cls, module: Any) -> _FuseArguments | None:
        """Return the arguments that a module was fused with; None if it was not, but made by a fused module's class."""
        captured = module.__dict__.get("_cupyfuse")
        return None if captured is None else cls(captured.options, captured.graphs)


def refresh(module: torch.nn.Module) -> None:
    """Prepack a fused module's weights again at its next call.

    Nothing is kept on the CPU. On a GPU every call notices changes by itself: those that PyTorch counts, optimizers'
    steps, gradients, and changes of a sample of each row. Call `refresh` only after writing a few elements of a large
    matrix through `parameter.data` or from outside PyTorch; after writing a few elements in any way, before a CUDA
    graph is replayed; and after changes through `parameter.data` of a module that was fused with `frozen=True`.
    """
    check_module(module)
    for part in module.modules():
        captured = part.__dict__.get("_cupyfuse")
        for runner in captured.runners if captured is not None else ():
            runner.refresh()


class FallbackMethod:
    """A descriptor that makes a function of modules a method, unless a parameter, buffer or submodule has its name."""

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
    """Base of the classes of fused modules, beside the original class."""

    _cupyfuse_original: ClassVar[type[torch.nn.Module]]

    explain = FallbackMethod(explain)
    refresh = FallbackMethod(refresh)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Hooks of the user's class are not called for classes that `fuse` makes.
        if "_cupyfuse_original" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Tensors move to another device or dtype: weights prepacked from the old ones should not keep memory.
        captured = self.__dict__.get("_cupyfuse")
        for runner in captured.runners if captured is not None else ():
            runner.release()
        return super()._apply(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a module of the original class with the same attributes: pickle finds that class by name.
        plain, slots = _as_plain(self), slot_attributes(self)
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k not in _CAPTURE}
        make, arguments, *more = plain.__reduce_ex__(protocol)
        own = self._cupyfuse_original.__setstate__ is not torch.nn.Module.__setstate__
        if slots and not own and more and isinstance(more[0], tuple):
            more[0] = more[0][0]  # without the slots, which `Module.__setstate__` does not take
        return _rebuild, (make, arguments, _FuseArguments.of(self), slots), *more

    def __setstate__(self, state: Any) -> None:
        # A user's method may replace all attributes.
        capture = {name: self.__dict__[name] for name in _CAPTURE if name in self.__dict__}
        super().__setstate__(state)
        self.__dict__.update(capture)

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        # A replica lives for one call, on a thread of its own: not worth a capture.
        replica.__dict__["_compiled_call_impl"] = None
        return replica


def _as_plain(module: Any) -> Any:
    """Return an instance of a fused module's original class that shares its attributes."""
    plain: Any = object.__new__(module._cupyfuse_original)
    object.__setattr__(plain, "__dict__", module.__dict__)
    for name, value in slot_attributes(module).items():
        object.__setattr__(plain, name, value)
    return plain


def _rebuild(make: Callable[..., Any], arguments: Any, choices: _FuseArguments | None, slots: dict[str, Any]) -> Any:
    """Make a module of an original class, fused if there are choices, before its state is set: to unpickle and copy."""
    module = make(*arguments)
    for name, value in slots.items():
        object.__setattr__(module, name, value)
    return module if choices is None else _as_fused(module, choices)


def _as_fused(module: Any, choices: _FuseArguments) -> Any:
    """Change a module into a fused one; or give a fused one, copied with its attributes, a capture of its own."""
    cls: Any = type(module)
    if not issubclass(cls, FusedModule):
        object.__setattr__(module, "__class__", fused_class(cls))
    _attach_capture(module, choices)
    return module


def _copying(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make `__copy__` or `__deepcopy__` of a user's class return a fused module.

    It gets an instance of that class, for it may make the copy by the instance's `type`.
    """

    @functools.wraps(method)
    def copied(module: Any, *memo: Any) -> Any:
        plain = _as_plain(module)
        if memo:  # of `deepcopy`: a module that refers to itself comes here again, once its copy is noted as `plain`'s
            plain = memo[0].setdefault(("cupyfuse", id(module)), plain)
            if id(plain) in memo[0]:
                return memo[0][id(plain)]
        other, choices = method(plain, *memo), _FuseArguments.of(module)
        if other is plain:
            return module
        if choices is None or not isinstance(other, torch.nn.Module):
            return other
        return _as_fused(other, choices)

    return copied


def _attach_capture(module: Any, choices: _FuseArguments) -> None:
    """Have calls of a module captured by Dynamo and run fused."""
    from .capture import Capture  # it imports Dynamo

    Capture(choices.options, choices.graphs).attach(module)


@functools.cache
def fused_class(original: Any) -> Any:
    """Make the subclass of a module class whose instances run fused; it has the class's name."""
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_cupyfuse_original": original,
    }
    # Methods of these names stay the user's; `cupyfuse.torch.explain` and `refresh` reach every module.
    names.update({name: getattr(original, name) for name in ("explain", "refresh") if hasattr(original, name)})
    if "_wrapped_call" in vars(original):  # a class that `torch.fx` wrote the code of a graph into
        # It would write another wrapper into this one, which calls the original's `__call__`, which calls the wrapper.
        names["_wrapped_call"] = vars(original)["_wrapped_call"]
    methods = {name: getattr(original, name, None) for name in _COPY_METHODS}
    names.update({name: _copying(method) for name, method in methods.items() if method is not None})
    return type(original)(original.__name__, (FusedModule, original), names)


@functools.cache
def _original_class(cls: Any) -> Any:
    """Return the class that a fused module had before, also if `fully_shard` has made a subclass of the fused one."""
    if "_cupyfuse_original" in vars(cls):
        return cls._cupyfuse_original
    if not issubclass(cls, FusedModule):
        return cls
    names = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(_original_class, cls.__bases__)), names)


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
    """Return a module that computes the same, with every chain that gains running through cupyfuse.

    Dynamo captures the module's forward, as for `torch.compile`, when it is called with arguments of a new signature.
    Chains of operations that a cost model expects to gain run fused, the rest as PyTorch runs it.

    Parameters
    ----------
    module : torch.nn.Module
        Not changed; the fused module shares its parameters and buffers. Its submodules are copied: modes such as
        `eval()` are set separately.
    precision : {"highest", "high", "medium", "ieee", "tf32"}, optional
        Of float32 products; PyTorch's `torch.get_float32_matmul_precision()` unless given.
    max_workspace : int
        Bytes of workspace of a chain, where it can run in blocks of rows or of columns.
    keep_halves : bool
        Whether the fp16 hi/lo split of float32 weights, as large as the weights, is kept from call to call.
    frozen : bool
        The caller's promise that no weight changes: prepacked weights are kept without a check.
    graphs : bool
        Whether calls run as CUDA graphs: one launch a captured graph, for inputs of fixed shapes.
    only_gains : bool
        Whether chains that the cost model expects to lose are left to PyTorch.
    max_prepared : int, optional
        Bytes of prepacked weights (hi/lo splits, sums) that may be kept from call to call, first come, first kept; 0
        keeps none. By default each chain may keep up to a quarter of the GPU's memory that is free at its first call.

    Returns
    -------
    torch.nn.Module
        Of a subclass of the module's class, with the same parameters, buffers, hooks and names, and two more methods:
        `explain()` tells what was fused and why the rest was not, `refresh()` prepacks weights again.

    Raises
    ------
    TypeError
        `module` is not a module, or one whose code is not Python's (TorchScript); or an option is of another type.
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
    options = Options(precision, max_workspace, keep_halves, frozen, only_gains, max_prepared)
    check_flag("graphs", graphs)
    copies: dict[int, Any] = {}
    fused: M = _copy(module, copies, captured=True)
    for part in copies.values():
        if id(part) in copies:
            continue  # shared with the original, not copied
        for key, value in list(part.__dict__.items()):
            if key not in _UNSHARED:
                part.__dict__[key] = replace_modules(value, copies)
    _attach_capture(_captured_part(fused), _FuseArguments(options, graphs))
    return fused


def _captured_part(module: Any) -> Any:
    """Return the part of a fused module whose calls are captured: the module itself, or what DDP wraps.

    DDP's own Python code holds no chains, and Dynamo, which looks at each of its functions, would double its time.
    """
    wrapped = module.module if isinstance(module, DistributedDataParallel) else None
    return wrapped if isinstance(wrapped, FusedModule) else module


def _copy(module: Any, copies: dict[int, Any], captured: bool = False) -> Any:
    """Copy a module tree; parameters, buffers and hooks are shared with the original.

    `copies` gets the copy of each module by the module's id; modules that cannot be copied are their own. A `captured`
    one becomes one of a fused class.
    """
    if id(module) in copies:
        return copies[id(module)]
    atomic = isinstance(module, (torch.jit.ScriptModule, torch.nn.modules.lazy.LazyModuleMixin))
    if atomic or (is_fsdp(module) and not captured):
        copies[id(module)] = module
        return module
    cls: Any = type(module)
    original = _original_class(cls)
    copy: Any = object.__new__(fused_class(original) if captured else original)
    copies[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    copy.__dict__.pop("_cupyfuse", None)
    copy.__dict__["_compiled_call_impl"] = None
    for name, value in slot_attributes(module).items():
        object.__setattr__(copy, name, value)
    share_state(module, copy)
    if not is_fsdp(module):  # it sets gathered parameters on its children, which a copy of them would not see
        children = module._modules.items()
        inner = captured and isinstance(module, DistributedDataParallel)
        copy.__dict__["_modules"] = {name: None if c is None else _copy(c, copies, inner) for name, c in children}
    return copy
