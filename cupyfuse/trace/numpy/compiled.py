"""Compiled code of libraries, which has NumPy's own functions while a function is traced.

It creates arrays, as by `np.empty` for random numbers, and writes to their memory: a traced one would crash the
process, and no frame tells that it was not the user's code that called the function.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from typing import Any

import numpy as np

from ..user_code import is_installed

_known: set[str] = set()  # names of modules that were searched
_holders: list[tuple[dict[str, Any], str]] = []


def own_numpy() -> types.ModuleType:
    """Return a module that holds what `numpy` holds now."""
    own = types.ModuleType(np.__name__, np.__doc__)
    vars(own).update(vars(np))
    return own


def holders() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where compiled modules of installed packages hold the module `numpy`: (namespace, name)."""
    for name in sys.modules.keys() - _known:
        _known.add(name)
        module = sys.modules.get(name)
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if isinstance(loader, ExtensionFileLoader) and is_installed(str(getattr(module, "__file__", ""))):
            namespace = vars(module)
            _holders.extend((namespace, label) for label, value in list(namespace.items()) if value is np)
    yield from _holders
