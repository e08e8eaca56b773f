"""Leave the modes of a captured graph where an operation raises, as `with` does in eager.

A graph enters a mode by one operation and leaves it by another, which an error skips. `torch.utils.checkpoint` ends
recomputations by an error too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.fx import GraphModule
from torch.nn import attention


class _Entered(threading.local):
    """The modes that a thread's graphs have entered and not left, with the functions that leave them."""

    def __init__(self) -> None:
        self.modes: dict[Any, Callable[[Any], None]] = {}


_entered = _Entered()


def _enter_autocast(*settings: Any) -> Any:
    mode = autocast_mode._enter_autocast(*settings)
    _entered.modes[mode] = autocast_mode._exit_autocast
    return mode


def _enter_inference_mode(wanted: bool) -> Any:
    mode = grad_mode._enter_inference_mode(wanted)
    _entered.modes[mode] = grad_mode._exit_inference_mode
    return mode


def _leave(mode: Any) -> None:
    _entered.modes.pop(mode)(mode)


_RECORDED = {
    autocast_mode._enter_autocast: _enter_autocast,
    autocast_mode._exit_autocast: _leave,
    grad_mode._enter_inference_mode: _enter_inference_mode,
    grad_mode._exit_inference_mode: _leave,
}


def leaving_modes(module: GraphModule) -> Callable[..., Any]:
    """Return the forward of a captured graph, which leaves the modes that it has entered where it raises.

    Gradients that the graph switches for good stay as they are then.
    """
    used: set[Any] = set()
    for each in (m for m in module.modules() if isinstance(m, GraphModule)):
        recorded = [node for node in each.graph.nodes if node.target in _RECORDED]
        for node in recorded:
            node.target = _RECORDED[node.target]
        if recorded:
            each.recompile()
        used.update(node.target for node in each.graph.nodes)
    forward: Callable[..., Any] = module.forward
    if used.isdisjoint((*_RECORDED.values(), torch._C._set_grad_enabled, attention._sdpa_kernel)):
        return forward
    attends = attention._sdpa_kernel in used
    switches = [node.args[0] for node in module.graph.nodes if node.target is torch._C._set_grad_enabled]

    def run(*inputs: Any) -> Any:
        modes, before, recording = _entered.modes, len(_entered.modes), torch.is_grad_enabled()
        backends = attention._cur_sdpa_kernel_backends() if attends else ()
        try:
            return forward(*inputs)
        except BaseException:
            while len(modes) > before:
                mode, leave = modes.popitem()
                leave(mode)
            if not switches or switches[-1] == recording:
                torch._C._set_grad_enabled(recording)
            if attends:
                attention._sdpa_kernel(backends)
            raise

    return run
