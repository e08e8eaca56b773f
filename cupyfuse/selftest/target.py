"""Run the self-test's functions on an array library, and record their kernels and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..api.fuse import Fused
from ..cuda.kernel import Kernel
from ..cuda.sources import kernels_of
from ..errors import EngineError
from ..plan.plan import Plan
from .formats import Format
from .machine import on_host

# Row lengths that select the vectorised and the scalar variant of a kernel.
_WIDTHS = {"vectors": 64, "scalars": 63}


@dataclass(frozen=True)
class Failure:
    """A wrong result, or an error: of what, in which dtype, for which arguments, and what came instead of what."""

    what: str
    dtype: str
    given: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.what} in {self.dtype}: {self.given} gave {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class LaunchedKernel:
    """A kernel launched by a call.

    Attributes
    ----------
    template : the template in `kernels_cu/` that the kernel instantiates
    dtype : dtype of the call's arguments
    vectors : whether a thread loads and stores several elements at once
    """

    template: str
    dtype: str
    vectors: bool


@dataclass
class Target:
    """An array library (NumPy, or CuPy for kernels on a GPU), and the record of what ran on it.

    Attributes
    ----------
    xp : the array library
    collecting : whether to collect the kernels that a GPU would launch while NumPy runs the calls
    kernels : distinct kernels by source and the part that they play
    products : number of matrix products, splits and copies that were launched
    failures : wrong results, in the order found
    """

    xp: Any
    collecting: bool = False
    kernels: dict[tuple[str, str], LaunchedKernel] = field(default_factory=dict)
    products: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.xp is not np

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of pointwise kernels to run; NumPy has no variants."""
        return tuple(_WIDTHS) if self.on_gpu or self.collecting else ("vectors",)

    def flushing(self, form: Format) -> bool:
        """Whether subnormal numbers of the format are flushed to zero; see docs/numerics.md."""
        return self.on_gpu and form.name in ("float32", "bfloat16")

    def run(self, fused: Fused, arguments: Sequence[Any], form: Format, what: str) -> Any:
        """Call a function with positional arguments; return its results on the host, or None if it raised."""
        named = dict(zip(fused.signature.parameters, arguments, strict=False))
        return self.run_named(fused, named, (), form, what)

    def run_named(
        self,
        fused: Fused,
        arguments: Mapping[str, Any],
        bound: Sequence[str],
        form: Format,
        what: str,
        **options: Any,
    ) -> Any:
        """Call a function with arguments by name, some of them bound before; see `run`."""
        try:
            given = {name: self.xp.asarray(a) for name, a in arguments.items()}
            serve: Any = fused
            if bound:
                serve = fused.bind(**{name: given.pop(name) for name in bound}, **options)
                options = {}
            if self.on_gpu or self.collecting:
                # Before the call, which may change arguments in place.
                self._record_kernels(serve.plan(**given, **options), form)
            # The copy to the host raises errors of launched kernels.
            return _on_host(serve(**given, **options))
        except (EngineError, RuntimeError, MemoryError) as error:
            self.failures.append(Failure(what, form.name, "the call", f"{type(error).__name__}: {error}", "a result"))
            return None

    def run_flat(self, fused: Fused, columns: Sequence[Any], form: Format, variant: str, what: str) -> Any:
        """Call a pointwise function on vectors, as matrices whose width selects the variant; see `run`."""
        width, size = _WIDTHS[variant], columns[0].size
        grids = [np.resize(c, (-(-size // width), width)) for c in columns]
        results = self.run(fused, grids, form, what)
        return None if results is None else [np.asarray(r).ravel()[:size] for r in results]

    def _record_kernels(self, plan: Plan, form: Format) -> None:
        """Record the kernels that a plan, and the one that prepacks for it, launch."""
        device = plan.settings.device
        clusters = device is not None and device.has_warpgroups
        for part in filter(None, (plan, plan.prepare)):
            for step in part.steps:
                if step.kind in ("Gemm", "Split", "Copy", "Library", "Scan"):
                    self.products += 1
                    continue
                for kernel in kernels_of(step, part.scheduled.storage, clusters=clusters):
                    part_played = _template(kernel)
                    here = LaunchedKernel(part_played, form.name, kernel.config.vec > 1)
                    self.kernels.setdefault((kernel.source, part_played), here)


def _template(kernel: Kernel) -> str:
    """Name the template of a kernel for the report, with the part that it plays where blocks share rows."""
    template = kernel.config.template
    if kernel.name.endswith("merge_kernel"):
        return f"{template}, merge of shares"
    return template + (", in shares" if template == "column_stats" and kernel.config.shares > 1 else "")


def _on_host(results: Any) -> Any:
    """Copy one result, or several, to the host."""
    if isinstance(results, (tuple, list)):
        return [on_host(r) for r in results]
    return on_host(results)
