"""Programs that tests write: a module of its own for each."""

from __future__ import annotations

import linecache
import sys
import types
from typing import Any


class ProgramModule:
    """A module made of source text that calls `make()` for its function. Errors show the text's lines.

    Parameters
    ----------
    name : str
        Of the module.
    source : str

    Attributes
    ----------
    function : callable
        What `make` in the source returns.
    """

    def __init__(self, name: str, source: str):
        source, file = f"{source}\nfunction = make()\n", f"<{name}>.py"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        self._module = types.ModuleType(name)
        self._module.__file__ = file
        sys.modules[name] = self._module
        exec(compile(source, file, "exec"), self._module.__dict__)
        self.function: Any = self._module.__dict__["function"]

    def close(self) -> None:
        del sys.modules[self._module.__name__]
