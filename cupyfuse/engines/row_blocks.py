"""Run a plan in blocks of rows, so that intermediate values never exist for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..plan.plan import Plan

Engine = Callable[[Plan, Sequence[Any]], Any]


def load(engine: Engine, plan: Plan, arrays: Sequence[Any]) -> Any:
    """Load a plan on an engine for arrays like those given, in blocks if the plan asks for them."""
    return engine(plan, arrays) if plan.blocks is None else RowBlocks(plan, arrays, engine)


class RowBlocks:
    """A plan in blocks, loaded on an engine for arrays like those given: arguments, then prepacked values."""

    def __init__(self, plan: Plan, arrays: Sequence[Any], engine: Engine):
        blocks = plan.blocks
        assert blocks is not None
        self.plan = plan
        self._common = None if blocks.common is None else engine(blocks.common, _inputs(blocks.common, arrays))
        arrays = self._with_common(arrays)
        self._starts = range(0, blocks.total, blocks.rows)
        self._cut = [k in blocks.arguments for k in range(len(arrays))]
        self._block = engine(blocks.plan, self._rows(arrays, slice(0, blocks.rows)))
        self._last = self._block
        if blocks.last is not None:
            self._last = engine(blocks.last, self._rows(arrays, slice(self._starts[-1], None)))

    def _with_common(self, arrays: Sequence[Any]) -> list[Any]:
        """Append the values that all blocks share."""
        if self._common is None:
            return list(arrays)
        plan = self._common.plan
        return [*arrays, *self._common(_inputs(plan, arrays), [None] * len(plan.outputs))]

    def _rows(self, arrays: Sequence[Any], rows: slice) -> list[Any]:
        return [_matrix(a)[rows] if cut else a for a, cut in zip(arrays, self._cut, strict=True)]

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """Run; `outs` holds, for each result, an array to write it to, or None to allocate one."""
        results = [
            self._block.empty(o.shape, o.dtype)
            if out is None or (o.axes.folded and not out.flags.c_contiguous)
            else out
            for o, out in zip(self.plan.outputs, outs, strict=True)
        ]
        targets = [
            r.reshape(o.node.shape) if o.axes.folded else r for o, r in zip(self.plan.outputs, results, strict=True)
        ]
        arrays = self._with_common(arrays)
        for start in self._starts:
            rows = slice(start, start + self._starts.step)
            execute = self._last if start == self._starts[-1] else self._block
            execute(self._rows(arrays, rows), [r[rows] for r in targets], numbers)
        for k, out in enumerate(outs):
            if out is not None and results[k] is not out:
                out[...] = results[k]
                results[k] = out
        return results


def _matrix(array: Any) -> Any:
    """View an array of more than two dimensions as rows x columns."""
    return array if array.ndim <= 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _inputs(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    return [arrays[n.argument] for n in plan.graph.inputs]
