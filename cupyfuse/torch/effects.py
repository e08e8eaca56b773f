"""What a forward does beside computing: changes of attributes, of what they hold, of globals; seen and undone."""

from __future__ import annotations

import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from .guards import MOST_ELEMENTS, PLAIN
from .reach import OWN, content, functions_of, has_members, reads

_MOST_DEPTH = 4
_MOST_THINGS = 10000


class Snapshot:
    """What a module tree's code can reach, to see which of it a forward changes.

    Parameters
    ----------
    module : Module
        The root of the tree.
    """

    def __init__(self, module: torch.nn.Module):
        self._tables: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self._holders: list[tuple[str, str, Any, Any]] = []
        self._reads: list[tuple[str, Any, str, Any]] = []
        self._seen: set[int] = set()
        for path, part in module.named_modules():
            for table in (part.__dict__, part._parameters, part._buffers, part._modules):
                self._tables.append((path, "", table, dict(table)))
                self._seen.add(id(table))
        for path, part in module.named_modules():
            for key, value in part.__dict__.items():
                if key not in OWN:
                    self._hold(path, key, value)
            for owner, key, value in reads(functions_of(part)):
                if value is not types:
                    self._reads.append((path, owner, key, value))
                    self._hold(path, key or "a variable of its closure", value)

    def _hold(self, path: str, name: str, value: Any, depth: int = 0) -> None:
        """Keep what a container or an object holds, and what that holds."""
        if isinstance(value, PLAIN) or id(value) in self._seen or depth > _MOST_DEPTH:
            return
        if len(self._seen) > _MOST_THINGS:
            return
        self._seen.add(id(value))
        inner: list[Any] = []
        if isinstance(value, (list, dict, set, deque)):
            self._holders.append((path, name, value, value.copy()))
            inner = _items(value)
        elif isinstance(value, tuple):
            inner = list(value)
        elif isinstance(value, np.ndarray):
            if value.size <= MOST_ELEMENTS and value.flags.writeable:
                self._holders.append((path, name, value, value.copy()))
        elif has_members(value) and not isinstance(value, (type, types.ModuleType, torch.nn.Module)):
            table = vars(value)
            self._tables.append((path, name, table, dict(table)))
            inner = list(table.values())
        for part in inner:
            self._hold(path, name, part, depth + 1)

    def restore(self) -> tuple[str, str] | None:
        """Undo what was changed; returns the path of the module and the name of the first attribute that was."""
        first: tuple[str, str] | None = None
        for path, name, table, before in self._tables:
            keys = [k for k in {**before, **table} if k != "_cupyfuse"]
            changed = [k for k in keys if (k in table) != (k in before) or table.get(k) is not before.get(k)]
            if changed:
                first = first or (path, name or changed[0])
                held = {k: v for k, v in table.items() if k == "_cupyfuse"}
                table.clear()
                table.update({**before, **held})
        for path, name, holder, kept in self._holders:
            if not _same(holder, kept):
                first = first or (path, name)
                if isinstance(holder, np.ndarray):
                    holder[...] = kept
                else:
                    holder.clear()
                    holder.extend(kept) if isinstance(holder, (list, deque)) else holder.update(kept)
        for path, owner, key, value in self._reads:
            if _current(owner, key) is not value:
                first = first or (path, key or "a variable of its closure")
                _put(owner, key, value)
        return first


def _current(owner: Any, key: str) -> Any:
    if isinstance(owner, types.CellType):
        return content(owner)
    return (owner if isinstance(owner, dict) else vars(owner)).get(key)


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)


def _same(holder: Any, before: Any) -> bool:
    if isinstance(holder, np.ndarray):
        return holder.shape == before.shape and holder.tobytes() == before.tobytes()
    if isinstance(holder, dict) and list(holder) != list(before):
        return False
    return len(holder) == len(before) and all(a is b for a, b in zip(_items(holder), _items(before), strict=True))


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
