"""Register the backend "cupyfuse" with `torch.compile`, whether or not the package's entry points are installed.

Dynamo takes a second to import, and only compilation needs it: the backend is registered when Dynamo's registry is
imported, or at once if it has been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_REGISTRY = "torch._dynamo.backends.registry"


def register() -> None:
    """Register the backend, now or when the registry is imported."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        registry.register_backend(_backend, name="cupyfuse")
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _backend(module: Any, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    from .backend import backend

    return backend(module, example_inputs, **options)


class _Finder(MetaPathFinder):
    """An import hook that finds the registry as the path finder does, and registers the backend once it has loaded."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the registry, and have it register the backend once it has run; other modules are left to others."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                module.register_backend(_backend, name="cupyfuse")

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec
