"""What a record depends on beside shapes: plain attributes, training flags, submodules, hooks, missing parameters.

A record was made by running Python code once. As long as everything that the code can have read of its modules is as it
was, running it again would give the same record; `Guard` is that comparison, compiled to one expression, since it
is made at every call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

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
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
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
        for path, module in modules.items():
            self._of_module(path, module)
        body = " and ".join(self._terms) or "True"
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
        read = f"{table}[{key!r}]"
        if isinstance(value, bool) or value is None:
            self._terms.append(f"{read} is {value!r}")
        elif isinstance(value, _PLAIN) or _plain_container(value):
            copy = value.copy() if isinstance(value, (list, dict, set)) else value
            name = self._name(copy)
            same = (
                f"{read} == {name}"
                if isinstance(value, (list, dict, set))
                else f"({read} is {name} or {read} == {name})"
            )
            self._terms.append(f"type({read}) is {self._name(type(value))} and {same}")
        else:
            self._terms.append(f"{read} is {self._name(value)}")
            if isinstance(value, _CONTAINERS):
                self._terms.append(f"len({read}) == {len(value)}")


def _plain_container(value: Any) -> bool:
    if not isinstance(value, _CONTAINERS):
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return len(items) <= 64 and all(isinstance(v, _PLAIN) for v in items)


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
