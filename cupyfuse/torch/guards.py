"""What a record depends on beside shapes: plain attributes, training flags, submodules, hooks, missing parameters.

A record was made by running Python code once. As long as everything that the code can have read of its modules is as it
was, running it again would give the same record; `Guard` is that comparison, compiled to one expression, since it
is made at every call.
"""

from __future__ import annotations

import enum
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = {
    "_parameters",
    "_buffers",
    "_modules",
    "_cupyfuse",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    *torch.nn.Module().__dict__,
} - {"training"}
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (list, dict, set, tuple)


def hooked(module: torch.nn.Module) -> bool:
    """Whether code of the user's runs around the module's forward."""
    return any(getattr(module, name, None) for name in _HOOKS)


def globally_hooked() -> bool:
    """Whether code of the user's runs around every module's forward."""
    return bool(torch.nn.modules.module._has_any_global_hook())


class Guard:
    """Whether modules are as they were.

    Parameters
    ----------
    modules : dict of str to Module
        Those whose code ran, by path; the root has the path "".
    """

    def __init__(self, modules: dict[str, torch.nn.Module]):
        self._values: dict[str, Any] = {"torch": torch}
        self._terms: list[str] = []
        self._seen: set[Any] = set()
        for path, module in modules.items():
            self._of_module(path, module)
            self._of_code(getattr(getattr(module, "_cupyfuse_original", type(module)), "forward", None))
        everywhere = torch.nn.modules.module
        for name in _GLOBAL_HOOKS:
            self._terms.append(f"not {self._name(getattr(everywhere, name))}")
        body = " and ".join(self._terms)
        scope = dict(self._values)
        exec(f"def holds():\n    return {body}\n", scope)
        self.holds: Callable[[], bool] = scope["holds"]

    def _name(self, value: Any) -> str:
        name = f"v{len(self._values)}"
        self._values[name] = value
        return name

    def _of_module(self, path: str, module: torch.nn.Module) -> None:
        table = self._name(module.__dict__)
        self._terms.append(f"len({table}) == {len(module.__dict__)}")
        for key, value in module.__dict__.items():
            if key not in _OWN:
                self._of_attribute(table, key, value)
        if path:
            for name in _HOOKS:
                self._terms.append(f"not {self._name(getattr(module, name))}")
        for tensors in (module._parameters, module._buffers):
            entries = self._name(tensors)
            for key, tensor in tensors.items():
                self._terms.append(f"{entries}[{key!r}] is {'' if tensor is None else 'not '}None")
            self._terms.append(f"len({entries}) == {len(tensors)}")
        children = self._name(module._modules)
        self._terms.append(f"len({children}) == {len(module._modules)}")
        for key, child in module._modules.items():
            self._terms.append(f"{children}[{key!r}] is {self._name(child)}")

    def _of_attribute(self, table: str, key: str, value: Any) -> None:
        self._of_value(f"{table}[{key!r}]", value)

    def _of_value(self, read: str, value: Any) -> None:
        """Whether what an expression reads is a value as it was."""
        if isinstance(value, bool) or value is None:
            self._terms.append(f"{read} is {value!r}")
            return
        if isinstance(value, PLAIN):
            name = self._name(value)
            self._terms.append(f"({read} is {name} or type({read}) is type({name}) and {read} == {name})")
            return
        self._terms.append(f"{read} is {self._name(value)}")
        content = frozen(value)
        if content is not None:
            self._terms.append(f"{self._name(frozen)}({read}) == {self._name(content)}")

    def _of_code(self, function: Any, depth: int = 0) -> None:
        """The plain values that a function reads from its globals and its closure, and those of functions it calls."""
        code = getattr(function, "__code__", None)
        if code is None or depth > 3 or code in self._seen:
            return
        self._seen.add(code)
        module = str(getattr(function, "__module__", ""))
        if module.partition(".")[0] in ("torch", "cupyfuse", "numpy", "math"):
            return
        scope = function.__globals__
        table = self._name(scope)
        found = [(f"{table}[{key!r}]", scope[key]) for key in code.co_names if key in scope]
        for cell in function.__closure__ or ():
            found.append((f"{self._name(cell)}.cell_contents", _content(cell)))
        for read, value in found:
            if isinstance(value, types.FunctionType):
                self._of_code(value, depth + 1)
            elif isinstance(value, (*PLAIN, *_CONTAINERS)):
                self._of_value(read, value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return types


def frozen(value: Any, depth: int = 0) -> Any:
    """The plain contents of a container or of an object, to compare later; None where nothing can be said."""
    if isinstance(value, PLAIN):
        return value
    if depth > 3:
        return None
    if isinstance(value, dict):
        return [(k, frozen(v, depth + 1)) for k, v in value.items()] if len(value) <= 64 else len(value)
    if isinstance(value, (list, tuple)):
        return [type(value), *(frozen(v, depth + 1) for v in value)] if len(value) <= 64 else len(value)
    if isinstance(value, (set, frozenset)):
        return {v for v in value if isinstance(v, PLAIN)} if len(value) <= 64 else len(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, types.FunctionType, types.ModuleType)):
        return None
    attributes = getattr(value, "__dict__", None)
    return frozen(dict(attributes), depth + 1) if attributes else None


class Snapshot:
    """The attributes of a module tree, to see which of them a forward changes."""

    def __init__(self, module: torch.nn.Module):
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, str, Any, Any]] = []
        for path, part in module.named_modules():
            for table in (part.__dict__, part._parameters, part._buffers, part._modules):
                self._tables.append((path, table, dict(table)))
            for key, value in part.__dict__.items():
                if key not in _OWN and isinstance(value, (list, dict, set)):
                    self._containers.append((path, key, value, value.copy()))

    def restore(self) -> tuple[str, str] | None:
        """Undo what was changed; returns the path of the module and the name of the first attribute that was."""
        first: tuple[str, str] | None = None
        for path, table, before in self._tables:
            keys = [k for k in {**before, **table} if k != "_cupyfuse"]
            changed = [k for k in keys if (k in table) != (k in before) or table.get(k) is not before.get(k)]
            if changed:
                first = first or (path, changed[0])
                held = {k: v for k, v in table.items() if k == "_cupyfuse"}
                table.clear()
                table.update({**before, **held})
        for path, key, container, before in self._containers:
            same = len(container) == len(before) and all(
                a is b for a, b in zip(_items(container), _items(before), strict=True)
            )
            if not same:
                first = first or (path, key)
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        return first


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


class Outside:
    """What a forward may change beside its module: random numbers of Python and NumPy, containers among arguments."""

    def __init__(self, arguments: Any):
        self._random = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002  the generator that user code may draw from
        self._lengths = _lengths(arguments)

    def restore(self, arguments: Any) -> str:
        """Undo what was drawn; returns what was done, empty for nothing."""
        drawn = random.getstate() != self._random
        random.setstate(self._random)
        now: Any = np.random.get_state()  # noqa: NPY002
        drawn = drawn or now[2] != self._numpy[2] or not np.array_equal(now[1], self._numpy[1])
        np.random.set_state(self._numpy)  # noqa: NPY002
        if drawn:
            return "random numbers of Python or NumPy are drawn in it"
        return "" if _lengths(arguments) == self._lengths else "a container among its arguments is changed"


def _lengths(tree: Any) -> list[Any]:
    """The shape of nested containers."""
    if isinstance(tree, dict):
        return [list(tree), *map(_lengths, tree.values())]
    return [len(tree), *map(_lengths, tree)] if isinstance(tree, (list, tuple)) else []
