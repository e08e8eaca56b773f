"""Calls of modules, led through a recorder for as long as this thread records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_here = threading.local()
_lock = threading.RLock()


@contextmanager
def modules_through(recorder: Any) -> Iterator[None]:
    """Have this thread's calls of modules go through the recorder."""
    with _lock:
        original = torch.nn.Module.__call__
        loud, _LOG.disabled = _LOG.disabled, True  # of what fails here, the module's own code tells

        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            active = getattr(_here, "recorder", None)
            if active is None:
                return original(module, *args, **kwargs)
            return active.call_module(original, module, args, kwargs)

        torch.nn.Module.__call__ = call
        _here.recorder = recorder
        try:
            yield
        finally:
            _here.recorder = None
            torch.nn.Module.__call__ = original
            _LOG.disabled = loud


@contextmanager
def unpatched() -> Iterator[None]:
    recorder, _here.recorder = _here.recorder, None
    try:
        yield
    finally:
        _here.recorder = recorder
