"""Run a plan in blocks of rows, so that intermediate values never exist for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..plan.plan import Output, Plan
from ..plan.schedule.blocks import COLUMNS, WHOLE

Engine = Callable[[Plan, Sequence[Any]], Any]


def load(engine: Engine, plan: Plan, arrays: Sequence[Any]) -> Any:
    """Load a plan on an engine for arrays like those given, in blocks if the plan asks for them."""
    return engine(plan, arrays) if plan.blocks is None else RowBlocks(plan, arrays, engine)


class RowBlocks:
    """A plan in blocks, loaded on an engine for arrays like those given: arguments, then prepacked values."""

    def __init__(self, plan: Plan, arrays: Sequence[Any], engine: Engine):
        blocks = plan.blocks
        assert blocks is not None
        self.plan, self._blocks = plan, blocks
        self._starts = range(0, blocks.total, blocks.rows)
        self._before = None if blocks.before is None else engine(blocks.before, _inputs(blocks.before, arrays))
        given = self._sources(arrays, ())
        self._common = None if blocks.common is None else engine(blocks.common, _inputs(blocks.common, given))
        given = self._with_common(given, ())
        self._zeros = None if blocks.zeros is None else engine(blocks.zeros, [])
        sums = self._cleared([None] * len(plan.outputs))
        self._block = engine(blocks.plan, [*self._rows(given, slice(0, blocks.rows)), *sums])
        self._last = self._block
        if blocks.last is not None:
            self._last = engine(blocks.last, [*self._rows(given, slice(self._starts[-1], None)), *sums])
        self._after: Any = None
        if blocks.after is not None:
            kept = [self._block.empty((blocks.total, o.node.shape[1]), o.dtype) for o in blocks.plan.outputs]
            self._after = engine(blocks.after, _inputs(blocks.after, [*arrays[: blocks.arguments], *kept, *sums]))

    # What a block takes
    def _sources(self, arrays: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """Return the arrays that blocks cut, or take whole: arguments, and what is computed before."""
        before: list[Any] = []
        if self._before is not None:
            plan = self._before.plan
            before = self._before(_inputs(plan, arrays), [None] * len(plan.outputs), numbers)
        return [arrays[s.number] if s.number >= 0 else before[-1 - s.number] for s in self._blocks.sources]

    def _with_common(self, given: list[Any], numbers: Sequence[float]) -> list[Any]:
        """Append the values that all blocks share."""
        if self._common is None:
            return given
        plan = self._common.plan
        return [*given, *self._common(_inputs(plan, given), [None] * len(plan.outputs), numbers)]

    def _rows(self, given: Sequence[Any], rows: slice) -> list[Any]:
        modes = [s.mode for s in self._blocks.sources]
        return [*map(_cut, given, modes, [rows] * len(modes)), *given[len(modes) :]]

    def _cleared(self, outs: Sequence[Any]) -> list[Any]:
        """Return the sums at zero, in the results that are sums."""
        if self._zeros is None:
            return []
        cleared: list[Any] = self._zeros([], [outs[k] if k >= 0 else None for k in self._blocks.summed])
        return cleared

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """Run; `outs` holds, for each result, an array to write it to, or None to allocate one."""
        blocks, results = self._blocks, list(outs)
        kept = []
        for k, o in zip(blocks.collected, blocks.plan.outputs, strict=True):
            if k < 0:
                kept.append(self._block.empty((blocks.total, o.node.shape[1]), o.dtype))
                continue
            output, out = self.plan.outputs[k], outs[k]
            if out is None or (output.axes.folded and not _is_contiguous(out)):
                results[k] = self._block.empty(output.shape, output.dtype)
            kept.append(_as_rows(output, results[k]))
        given = self._with_common(self._sources(arrays, numbers), numbers)
        sums = self._cleared([out if _is_contiguous(out) else None for out in outs])
        for k, value in zip(blocks.summed, sums, strict=True):
            if k >= 0:
                results[k] = value
        for start in self._starts:
            rows = slice(start, start + self._starts.step)
            execute = self._last if start == self._starts[-1] else self._block
            execute([*self._rows(given, rows), *sums], [r[rows] for r in kept], numbers)
        if self._after is not None:
            plan = self._after.plan
            values = [r.reshape(blocks.total, -1) for r in kept]
            after = _inputs(plan, [*arrays[: blocks.arguments], *values, *sums])
            found = self._after(after, [outs[k] for k in blocks.following], numbers)
            for k, value in zip(blocks.following, found, strict=True):
                results[k] = value
        for k, out in enumerate(outs):
            if out is not None and results[k] is not out:
                out[...] = results[k]
                results[k] = out
        return results


def _as_rows(output: Output, result: Any) -> Any:
    return result.reshape(output.node.shape) if output.axes.folded else result


def _is_contiguous(out: Any) -> bool:
    return out is not None and (out.flags.c_contiguous if hasattr(out, "flags") else out.is_contiguous())


def _cut(array: Any, mode: int, rows: slice) -> Any:
    if mode == WHOLE:
        return array
    if array.ndim > 2:
        array = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    return array[:, rows] if mode == COLUMNS and array.ndim == 2 else array[rows]


def _inputs(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    return [arrays[n.argument] for n in plan.graph.inputs]
