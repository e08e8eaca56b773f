"""Time norms, activations and softmaxes with weights in training: the forward pass, and both passes.

Errors are those of the result and of all gradients against float64, the worst of them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

from cupyfuse import dtypes

from . import options as types
from .lab import Lab, run
from .report import Case, Report, Requirement
from .rivals import BACKEND, COMPILED, EAGER, FUSED, Rival, as_run_by, device_copy
from .tables import ERROR, case_tables, explain, findings_table

COPY = "device copy"
FORWARD, BACKWARD = "Forward", "Forward and backward"
FIGURES = ("gpu_evicted", "wall")
_SHAPES = ((12608, 768), (32768, 1024), (262144, 256), (16384, 2560), (16384, 4096), (16384, 8192))
DEFAULTS = {"budget": (0.12, 0.03), "shapes": (_SHAPES, ((4096, 1024),))}
REQUIREMENTS = (
    Requirement("gpu_evicted", (FUSED,), 1.02, (EAGER,)),
    Requirement("gpu_evicted", (BACKEND,), 1.02, (COMPILED,)),
    Requirement("error", (FUSED,), 1.0, (EAGER,)),
)
_HOW = f"""\
{ERROR}.
- In training mode: of the forward pass, too, what the backward pass needs is kept. Gradients are those of the input,
  the scale and the shift, for a cotangent of normal numbers. *{COPY}*: of as many bytes as the input and the result
  have, with a backward pass also the cotangent, the input once more and its gradient."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "layer norm": lambda F, x, scale, shift: F.layer_norm(x, x.shape[1:], scale, shift, 1e-5),
    "RMS norm": lambda F, x, scale, shift: F.rms_norm(x, x.shape[1:], scale, 1e-6) + shift,
    "GELU": lambda F, x, scale, shift: F.gelu(x * scale + shift),
    "softmax": lambda F, x, scale, shift: F.softmax(x * scale + shift, 1),
    "ReLU of a batch norm": lambda F, x, scale, shift: F.relu(F.batch_norm(x, None, None, scale, shift, True)),
    "softmax of a batch norm": lambda F, x, scale, shift: F.softmax(F.batch_norm(x, None, None, scale, shift, True), 1),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_several(parser, "--functions", FUNCTIONS)
    types.add_several(parser, "--dtypes", types.DTYPES, default=("float32", "bfloat16"))


def _module(torch: Any, code: Callable[..., Any], columns: int, dtype: Any) -> Any:
    """Return a module of a function with a scale and a shift for each column."""

    class Weighted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter((torch.rand(columns) + 0.5).to(dtype))
            self.shift = torch.nn.Parameter(torch.randn(columns).to(dtype))

        def forward(self, x: Any) -> Any:
            return code(torch.nn.functional, x, self.scale, self.shift)

    return Weighted()


def cases_of(lab: Lab, name: str, shape: tuple[int, int], dtype: str, options: argparse.Namespace) -> Iterator[Case]:
    """Run every rival, forward, then forward and backward."""
    pytorch = lab.need_torch()
    torch, device = pytorch.torch, pytorch.device_type()
    torch.manual_seed(options.seed)
    torch_dtype, nbytes = getattr(torch, dtype), shape[0] * shape[1] * dtypes.ITEMSIZE[dtype]
    module = _module(torch, FUNCTIONS[name], shape[1], torch_dtype).to(device)
    x = torch.randn(*shape, device=device).to(torch_dtype).requires_grad_()
    cotangent = torch.randn(*shape, device=device).to(torch_dtype)
    wide = _module(torch, FUNCTIONS[name], shape[1], torch.float64).to(device)
    wide.load_state_dict(module.state_dict())

    def step(called: Any, original: Any, x: Any, backward: bool) -> Any:
        leaves = (x, *original.parameters()) if backward else ()
        return pytorch.Step(functools.partial(called, x), leaves, cotangent.to(x.dtype) if backward else None)

    for group, matrices in ((FORWARD, 2), (BACKWARD, 5)):
        backward = group == BACKWARD
        with torch.enable_grad():
            expected = step(wide, wide, x.detach().double().requires_grad_(), backward).results()

            def rival(way: str, backward: bool = backward, expected: Any = expected) -> Rival:
                made = step(as_run_by(way, lab, module), module, x, backward)
                # Of 16 bits eager's sums are rounded ones, up to 0.06 off.
                limit = 0.1 if dtypes.ITEMSIZE[dtype] < 4 else None
                return Rival(made, [made.results], expected, limit=limit)

            case = Case(f"{group}, {name}", f"{' x '.join(map(str, shape))}, {dtype}", shape, dtype, matrices * nbytes)
            rivals: dict[str, Callable[[], Rival]] = {
                way: functools.partial(rival, way) for way in (FUSED, BACKEND, EAGER, COMPILED)
            }
            source = lab.cupy.zeros(matrices * nbytes // 2, "uint8")
            rivals[COPY] = functools.partial(device_copy, lab, source, matrices * nbytes)
            run(lab, case, rivals, FIGURES, options.budget)
        yield case


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every function, dtype and shape."""
    for name in options.functions:
        for dtype in options.dtypes:
            for shape in options.shapes:
                lab.release()
                lab.need_torch().reset_compiler()
                yield from cases_of(lab, name, shape, dtype, options)


def report_lines(report: Report) -> list[str]:
    lines = [*findings_table(REQUIREMENTS, report.cases), *explain(FIGURES, _HOW)]
    return [*lines, *case_tables(report, EAGER, ["gpu_evicted"])]
