"""What a record depends on beside shapes: attributes, training flags, submodules, hooks, classes, globals, closures.

A record was made by running Python code once. As long as everything that the code can have read is as it was, running
it again would give the same record; `Guard` is that comparison, compiled to one expression, since it is made at every
call.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .modes import PLAIN as PLAIN_TENSORS
from .reach import OWN, classes, functions_of, reads
from .record import Record, Source, Submodule

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
MOST_ELEMENTS = 10000
_MOST_DEPTH = 3


def hooked(module: torch.nn.Module) -> bool:
    """Whether code of the user's runs around the module's forward or backward."""
    return any(getattr(module, name, None) for name in _HOOKS)


def watched(module: torch.nn.Module) -> bool:
    """Whether code of the user's runs around the forward of a module or of one within it, and may change results."""
    return any(getattr(part, name, None) for part in module.modules() for name in _FORWARD_HOOKS)


def globally_hooked() -> bool:
    """Whether code of the user's runs around every module's forward."""
    return bool(torch.nn.modules.module._has_any_global_hook())


class Guard:
    """Whether a module tree, and what else its code can read, is as it was.

    Parameters
    ----------
    root : Module
    record : Record or None
        What was recorded of it. Without, only what decides whether recording is worth another try is compared: which
        modules there are, of which classes, and whether they have hooks. Attributes may change at every call then.
    """

    def __init__(self, root: torch.nn.Module, record: Record | None = None):
        self._values: dict[str, Any] = {"dtype": torch.get_default_dtype, "plain": PLAIN_TENSORS}
        self._names: dict[int, str] = {}
        self._terms: list[str] = []
        modules = dict(root.named_modules())
        if record is None:
            for path, module in modules.items():
                self._of_structure(path, module, True)
        else:
            self._of_record(modules, record)
        everywhere = torch.nn.modules.module
        for name in _GLOBAL_HOOKS:
            self._terms.append(f"not {self._name(getattr(everywhere, name))}")
        body = " and ".join(self._terms)
        scope = dict(self._values)
        # What is read may be gone, or be of another kind.
        exec(f"def holds():\n try:\n  return {body}\n except Exception:\n  return False\n", scope)
        self.holds: Callable[[], bool] = scope["holds"]

    def _name(self, value: Any) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = name = f"v{len(self._values)}"
            self._values[name] = value
        return self._names[id(value)]

    def _of_record(self, modules: dict[str, torch.nn.Module], record: Record) -> None:
        called = {o.target.path for o in record.operations if isinstance(o.target, Submodule)} - set(record.inlined)
        self._terms.append(f"dtype() is {self._name(torch.get_default_dtype())}")
        sources = [source for source in record.sources.values() if isinstance(source, Source)]
        tables = {id(source.table) for source in sources}
        fetched = {(id(source.table), source.key) for source in sources}
        plain: set[int] = set()  # tables of PyTorch's own modules: their code reads the entries that it names alone
        ties: dict[int, list[str]] = {}
        kinds: set[type] = set()
        found: list[Any] = []
        for path, module in modules.items():
            if any(path.startswith(f"{p}.") for p in called):
                self._of_structure(path, module, False)
                continue
            self._of_structure(path, module, path not in called)
            own = ("_parameters", "_buffers")
            bare = type(module).__module__.startswith("torch.nn.modules.") and not module._modules
            bare = bare and not type(module).__module__.endswith(".container")
            plain.update(id(getattr(module, name)) for name in own if bare and path in record.inlined)
            if path in called or (bare and path not in record.inlined):
                for name in own:
                    if id(getattr(module, name)) in tables:
                        self._of_table(module, name)
                continue
            for name in own:
                table = getattr(module, name)
                if bare and not table:
                    continue
                entries = self._of_table(module, name, not bare)
                for key, tensor in table.items():
                    if (id(table), key) not in fetched:
                        self._terms.append(f"{entries}[{key!r}] is {'' if tensor is None else 'not '}None")
                    if tensor is not None:
                        ties.setdefault(id(tensor), []).append(f"{entries}[{key!r}]")
            self._of_attributes(module)
            if isinstance(module, torch.nn.modules.batchnorm._NormBase):
                self._of_statistics(module)
            kinds.update(classes(type(module)))
            found += functions_of(module)
        for tied in ties.values():
            self._terms += [f"{tied[0]} is {other}" for other in tied[1:]]
        for kind in sorted(kinds, key=id):
            self._of_class(kind)
        for source in sources:
            self._of_source(source, id(source.table) in plain and source.key == "bias")
        for owner, key, value in reads(found):
            self._of_read(owner, key, value)

    # Modules
    def _of_structure(self, path: str, module: torch.nn.Module, training: bool) -> None:
        """Which modules there are."""
        self._terms.append(f"{self._name(module)}.__class__ is {self._name(type(module))}")
        if path:
            for name in _HOOKS:
                hooks = getattr(module, name)
                self._terms.append(f"{'' if hooks else 'not '}{self._name(hooks)}")
        if training:
            self._terms.append(f"{self._name(module.__dict__)}['training'] is {module.training}")
        if module._modules or not type(module).__module__.startswith("torch.nn.modules."):
            children = self._of_table(module, "_modules")
            for key, child in module._modules.items():
                self._terms.append(f"{children}[{key!r}] is {self._name(child)}")

    def _of_table(self, module: torch.nn.Module, name: str, counted: bool = True) -> str:
        table = getattr(module, name)
        entries = self._name(table)
        self._terms.append(f"{self._name(module.__dict__)}[{name!r}] is {entries}")
        if counted:
            self._terms.append(f"len({entries}) == {len(table)}")
        return entries

    def _of_attributes(self, module: torch.nn.Module) -> None:
        table = self._name(module.__dict__)
        self._terms.append(f"len({table}) == {len(module.__dict__)}")
        for key, value in module.__dict__.items():
            if key in OWN or key == "training":
                continue
            if isinstance(value, torch.Tensor):  # it is fetched at every call, like a parameter
                self._terms.append(f"type({table}[{key!r}]) is {self._name(type(value))}")
            else:
                self._of_value(f"{table}[{key!r}]", value)

    def _of_statistics(self, module: Any) -> None:
        """Have updates of running statistics counted: PyTorch counts those of the number of batches alone."""
        if module.num_batches_tracked is not None and not module.training:
            renewed = self._name(_Renewed(module))
            self._terms.append(f"({renewed}.fresh() or {renewed}.renew())")

    def _of_source(self, source: Source, follows: bool) -> None:
        """What code reads of a tensor; the shape and dtype of a bias follow from the weight's."""
        tensor, read = source.fetch(), f"{self._name(source.table)}[{source.key!r}]"
        if follows:
            self._terms.append(f"{read}.requires_grad is {tensor.requires_grad}")
            return
        dtype, shape = self._name(tensor.dtype), self._name(tensor.shape)
        self._terms.append(f"(t := {read}).requires_grad is {tensor.requires_grad} and t.dtype is {dtype}")
        self._terms.append(f"t.shape == {shape}")

    # What is no module
    def _of_class(self, kind: type) -> None:
        table = self._name(vars(kind))
        self._terms.append(f"{self._name(tuple(vars(kind).values()))} == (*{table}.values(),)")
        for key, value in vars(kind).items():
            if not key.startswith("__") and isinstance(value, (int, float, list, dict, set, deque, np.ndarray)):
                self._of_value(f"{table}[{key!r}]", value)

    def _of_read(self, owner: Any, key: str, value: Any) -> None:
        if isinstance(value, (types.ModuleType, type)) and value is not types:
            return
        if isinstance(owner, types.CellType):
            read = f"{self._name(owner)}.cell_contents"
            if value is types:  # nothing in it yet
                return
        elif isinstance(owner, types.FunctionType):
            read = f"{self._name(owner)}.{key}"
        else:
            read = f"{self._name(owner if isinstance(owner, dict) else vars(owner))}[{key!r}]"
        if isinstance(value, (*PLAIN, list, dict, set, tuple, deque, np.ndarray)):
            self._of_value(read, value)
        else:  # of an object, what the code reads of it is compared by itself
            self._terms.append(f"{read} is {self._name(value)}")

    def _of_value(self, read: str, value: Any) -> None:
        """Whether what an expression reads is a value as it was."""
        if isinstance(value, bool) or value is None:
            self._terms.append(f"{read} is {value!r}")
            return
        if isinstance(value, PLAIN):
            name, kind = self._name(value), self._name(type(value))
            self._terms.append(f"({read} is {name} or type({read}) is {kind} and {read} == {name})")
            return
        self._terms.append(f"{read} is {self._name(value)}")
        if not _constant(value):
            self._terms.append(f"{self._name(frozen)}({read}) == {self._name(frozen(value))}")


class _Renewed:
    """Whether running statistics were updated since they were last looked at; then they get a new version."""

    def __init__(self, module: Any):
        self.module = module
        self.renew()

    def fresh(self) -> bool:
        count = self.module._buffers["num_batches_tracked"]
        return count is self.count and (self.seen < 0 or bool(count._version == self.seen))

    def renew(self) -> bool:
        self.count = self.module.num_batches_tracked
        self.seen = -1 if self.count.is_inference() else self.count._version
        for statistics in (self.module.running_mean, self.module.running_var):
            if statistics is not None and not statistics.is_inference():
                torch.autograd.graph.increment_version(statistics)
        return True


def _constant(value: Any) -> bool:
    """Whether what a value holds cannot change."""
    if type(value) in (tuple, frozenset):
        return all(_constant(v) for v in value)
    plain = (*PLAIN, torch.Tensor, torch.nn.Module, type, types.FunctionType, types.BuiltinFunctionType)
    return isinstance(value, (*plain, types.ModuleType, types.MethodType))


class _Same:
    """Equal to itself alone, whatever the value takes for equality."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any, depth: int = 0) -> Any:
    """The contents of a container or of an object, to compare later."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, np.ndarray):
        if value.size > MOST_ELEMENTS or value.dtype.hasobject:
            return _Same(value)
        return value.dtype, value.shape, value.tobytes()
    if depth > _MOST_DEPTH or isinstance(value, (torch.Tensor, torch.nn.Module)) or _constant(value):
        return _Same(value)
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        if len(value) > MOST_ELEMENTS:
            return len(value)
        # Of what is long, only the elements themselves.
        below = depth + 1 if len(value) <= 64 else _MOST_DEPTH + 1
        if isinstance(value, dict):
            return [(frozen(k, _MOST_DEPTH + 1), frozen(v, below)) for k, v in value.items()]
        if isinstance(value, (set, frozenset)):
            return len(value), {frozen(v, _MOST_DEPTH + 1) for v in value}
        return [type(value), *(frozen(v, below) for v in value)]
    kinds = classes(type(value))
    attributes = dict(getattr(value, "__dict__", ()))
    attributes |= {key: getattr(value, key) for kind in kinds for key in _slots(kind) if hasattr(value, key)}
    if not attributes and not kinds:
        return _Same(value)
    shared = [{k: v for k, v in vars(kind).items() if not k.startswith("__")} for kind in kinds]
    return [type(value), *(frozen(each, depth + 1) for each in (attributes, *shared))]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
