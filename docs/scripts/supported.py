"""Write docs/supported.md, the page of supported functions and operations, from the tables that implement them.

python docs/scripts/supported.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import cupyfuse as cf
from cupyfuse.api import elementwise_losses, functions, losses
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.torch.rules import RULES
from cupyfuse.trace.numpy import FUNCTIONS
from cupyfuse.trace.numpy.conversions import TAKING_TRACED
from cupyfuse.trace.numpy.scipy import FUNCTIONS as SCIPY
from cupyfuse.trace.numpy.scipy import METHODS as DISTRIBUTIONS
from cupyfuse.trace.numpy.steps import LIBRARY, NOT_DISPATCHED, REFUSED, dispatched_functions, public_name
from cupyfuse.trace.value import METHODS

PAGE = Path(__file__).resolve().parent.parent / "supported.md"
NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch.special)


def page() -> str:
    """Return the page's text."""
    sections = (
        "# Supported functions and operations",
        "Generated from the tables in `cupyfuse/` by `python docs/scripts/supported.py`; a test compares them.",
        "## NumPy\nFunctions, Python's operators on arrays, array methods of the same names, and CuPy's functions of "
        "the same names trace in fused functions. A *fused* function becomes operators of a kernel; a *library step* "
        "runs NumPy's or CuPy's own function on whole arrays, as a step of the plan that `fuse(strict=True)` refuses. "
        "Where a fused function is marked so, some of its options and dtypes are library steps. Options that are about "
        "memory (`order=`, `subok=`, `device=`) change no values; an option that is not supported is an error that "
        "names it.",
        _table(("function", "", "why"), numpy_functions()),
        f"**Array methods**: {_listed(sorted((*METHODS, *_OWN_METHODS)))}.",
        _table(("ufunc", ""), numpy_ufuncs()),
        "Their methods `reduce`, `accumulate`, `reduceat`, `outer` and `at` trace too. Functions and ufuncs take lists "
        "and tuples that hold arrays, as in `np.maximum([x, y], 0)`: a library step stacks them, but for reductions of "
        "a list such as `np.logical_and.reduce([a, b, c])`, which fuse.",
        "`x[mask]`, beside slices and integers too (`x[:, mask]`, `x[mask, 0]`), is an operand of pointwise work, "
        "reductions, medians, quantiles and averages, of products along the selected elements, and of assignment to "
        "the same elements; a mask of its own selects among it, as in `y[y > 0]`. "
        "So are the places that `np.nonzero(mask)`, `np.where(mask)` and `np.argwhere(mask)` give, which also are "
        "indices, as in `x[np.where(mask)] = 0`. One of them (`y[0]`, `np.flatnonzero(mask)[-1]`), argmax and argmin, "
        "and what NumPy's functions return whose shape does not depend on the number of elements, such as "
        "`np.cov(x[mask].T)`, are library steps; the elements themselves are no result, since their number is not "
        "known. "
        "Index arrays, read and assigned to, are library steps, but for labels: `y[np.arange(len(y)), labels]`. "
        "Where an index names an element twice, the last value stays; of `np.put` and `np.put_along_axis` on CuPy "
        "arrays, any of them. "
        "Arrays that the function makes (`np.zeros`, `np.full`, `np.array`) can be filled with what it computes; of "
        "those that compiled code makes, as random numbers, or `np.mgrid`, a copy by `np.array`. What "
        "needs values while the function is traced is an error that names the line: `if x.sum() > 0`, "
        "`len(x[mask])`, also where the function catches the error; `x.sum().item()` is a number that the call "
        "computes, and returns as Python's (of CuPy arrays, a 0-d array), as are `math.sqrt(x.sum())` and, except in "
        "code of more than 128 names that also uses `float` as a type, `float(x.sum())` and the like of `int`, `bool` "
        "and `complex`, and `x.tolist()` of up to 64 numbers. NumPy's types of numbers convert where they are called "
        "by name, `np.float32(x.sum())`; "
        "Python's `min` and `max` of scalars are `np.where`, also by a `key`, and its `any` and `all` take them, "
        'too. What is printed of them (`f"{x.sum():.3f}"`) tells no value.',
        "## SciPy\nThe ufuncs of `scipy.special` trace: those of the operator table fused, others as library steps. "
        "`logsumexp`, `softmax`, `log_softmax` and other functions written with NumPy's trace as their NumPy code. "
        "These are library steps, which run on CuPy arrays where `cupyx.scipy` has them; so are the densities, "
        "distribution functions and quantiles of the univariate distributions in `scipy.stats`, which are arguments of "
        "its tests too, as in `ks_1samp(y, norm.cdf)`.",
        *(f"**`{module}`**: {_listed(names.split())}." for module, names in SCIPY.items()),
        f"**Multivariate distributions**: {_listed(list(multivariate_methods()))}.",
        "Results with names have these fields, as in `pearsonr(x, y).statistic`; further attributes and methods of "
        "SciPy's objects are errors that name the line.",
        "## cupyfuse\nThese work in fused functions and on arrays of any rank.",
        _table(
            ("function", ""),
            (
                (f"`cf.{name}`", _summary(name))
                for name in (*functions.__all__, *losses.__all__, *elementwise_losses.__all__)
            ),
        ),
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


_OWN_METHODS = (
    *(
        "all",
        "any",
        "astype",
        "clip",
        "compress",
        "conj",
        "conjugate",
        "copy",
        "dot",
        "flatten",
        "ravel",
        "reshape",
        "squeeze",
    ),
    "transpose",
)
_STATES = {"fused": "fused", "library": "library step", "": "refused"}


def numpy_functions() -> Iterator[tuple[str, str, str]]:
    """Yield the public functions of NumPy that take arrays, how each runs, and why it does not."""
    fused = {public_name(f) for f in FUNCTIONS} | set(TAKING_TRACED)
    for name in sorted({*dispatched_functions(), *TAKING_TRACED, *NOT_DISPATCHED}):
        both = " (some dtypes or options: library step)" if name in fused & LIBRARY else ""
        if name in fused:
            yield f"`np.{name}`", f"fused{both}", ""
        elif name in LIBRARY:
            yield f"`np.{name}`", "library step", ""
        else:
            yield f"`np.{name}`", "refused", REFUSED.get(name, "it has neither form; call it outside")


def numpy_ufuncs() -> Iterator[tuple[str, str]]:
    """Yield the ufuncs, and how each runs on floats, else on integers or masks."""
    ufuncs = {f.__name__: f for f in vars(np).values() if isinstance(f, np.ufunc)}
    for name, ufunc in sorted(ufuncs.items()):
        yield f"`np.{name}`", _STATES[_state(ufunc)]


def _state(ufunc: np.ufunc) -> str:
    for dtype in ("float32", "int64", "bool"):
        try:
            plan = cf.fuse(lambda operands: ufunc(*operands)).plan([cf.spec((2, 2), dtype)] * ufunc.nin)
        except (TypeError, ValueError):
            continue
        return "library" if any(step.kind == "Library" for step in plan.steps) else "fused"
    return ""


def multivariate_methods() -> Iterator[str]:
    """Yield the methods of multivariate distributions, as "wishart.pdf"."""
    for path, names in DISTRIBUTIONS.items():
        module, _, cls = path.rpartition(".")
        if module:
            yield from (f"{cls.removesuffix('_gen')}.{name}" for name in names.split())


def torch_operations() -> dict[str, list[str]]:
    """Return the names of PyTorch's operations by the module of their rules."""
    groups: dict[str, list[str]] = {}
    for name, rule in sorted(RULES.items()):
        if any(hasattr(namespace, name) for namespace in NAMESPACES):
            groups.setdefault(rule.traced.__module__.rpartition(".")[2], []).append(name)
    return dict(sorted(groups.items()))


def _summary(name: str) -> str:
    return (getattr(cf, name).__doc__ or "").partition("\n")[0].replace("``", "`")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heading: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
