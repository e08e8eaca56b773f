"""Write docs/supported.md, the page of supported functions and operations, from the tables that implement them.

python docs/scripts/supported.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import cupyfuse as cf
from cupyfuse.api import functions
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.torch.rules import RULES
from cupyfuse.trace.numpy_functions import FUNCTIONS

PAGE = Path(__file__).resolve().parent.parent / "supported.md"
NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch.special)


def page() -> str:
    """Return the page's text."""
    sections = (
        "# Supported functions and operations",
        "Generated from the tables in `cupyfuse/` by `python docs/scripts/supported.py`; a test compares them.",
        "## NumPy\nThese trace in fused functions, as do Python's operators on arrays, array methods of the same "
        "names, and CuPy's functions of the same names.",
        f"**Functions**: {_listed(numpy_functions())}.",
        f"**Ufuncs**: {_listed(numpy_ufuncs())}.",
        "## cupyfuse\nThese work in fused functions and on arrays of any rank.",
        _table(("function", ""), ((f"`cf.{name}`", _summary(name)) for name in functions.__all__)),
        "## PyTorch\nIn fused modules and compiled models, as functions, tensor methods, operators, in-place forms and "
        "`torch.nn` modules. Operations outside this list run as PyTorch runs them; [torch.md](torch.md) says why.",
        *(f"**{group.capitalize()}**: {_listed(names)}." for group, names in torch_operations().items()),
        "## Operator table\nEverything above is expressed in these. The last column is the largest error that the "
        "[self-test](measured-errors.md) accepts, in units in the last place; 0 is exact.",
        _table(
            ("operator", "", "flops", "ulps"),
            ((f"`{op.name}`", op.doc, f"{op.flops}", f"{op.ulps:g}") for op in POINTWISE.values()),
        ),
        "Reductions run along rows or columns; their error bound is per element.",
        _table(
            ("reduction", "", "flops", "ulps"),
            ((f"`{op.name}`", op.doc, f"{op.flops}", f"{op.ulps:g}") for op in REDUCTIONS.values()),
        ),
    )
    return "\n\n".join(sections) + "\n"


def numpy_functions() -> list[str]:
    names = (f"{f.__module__}.{f.__name__}".replace("numpy", "np", 1) for f in FUNCTIONS)
    return sorted(set(names))


def numpy_ufuncs() -> list[str]:
    """Return the ufuncs that trace on floats or on masks."""
    ufuncs = {f.__name__: f for f in vars(np).values() if isinstance(f, np.ufunc)}
    return [f"np.{name}" for name, ufunc in sorted(ufuncs.items()) if _traces(ufunc)]


def _traces(ufunc: np.ufunc) -> bool:
    for dtype in ("float32", "bool"):
        try:
            cf.fuse(lambda operands: ufunc(*operands)).plan([cf.spec((2, 2), dtype)] * ufunc.nin)
        except (TypeError, ValueError):
            continue
        return True
    return False


def torch_operations() -> dict[str, list[str]]:
    """Return the names of PyTorch's operations by the module of their rules."""
    groups: dict[str, list[str]] = {}
    for name, rule in sorted(RULES.items()):
        if any(hasattr(namespace, name) for namespace in NAMESPACES):
            groups.setdefault(rule.traced.__module__.rpartition(".")[2], []).append(name)
    return dict(sorted(groups.items()))


def _summary(name: str) -> str:
    return (getattr(functions, name).__doc__ or "").partition("\n")[0].replace("``", "`")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heading: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
