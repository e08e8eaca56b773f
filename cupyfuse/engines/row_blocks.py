"""Run a plan in blocks of rows, so that what lies between a product and its results never exists as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..plan.plan import Plan

Engine = Callable[[Plan, Sequence[Any]], Any]


def ready(engine: Engine, plan: Plan, arrays: Sequence[Any]) -> Any:
    """A plan made ready on an engine for arrays like those given, in blocks where it says so."""
    return engine(plan, arrays) if plan.blocks is None else RowBlocks(plan, arrays, engine)


class RowBlocks:
    """A plan in blocks, made ready on an engine for arrays like those given: arguments, then prepared values."""

    def __init__(self, plan: Plan, arrays: Sequence[Any], engine: Engine):
        blocks = plan.blocks
        assert blocks is not None
        self.plan = plan
        self._common = None if blocks.common is None else engine(blocks.common, self._needed(blocks.common, arrays))
        if self._common is not None:
            arrays = [*arrays, *self._shared(arrays)]
        self._starts = range(0, blocks.total, blocks.rows)
        self._cut = [k in blocks.arguments for k in range(len(arrays))]
        self._block = engine(blocks.plan, self._rows(arrays, slice(0, blocks.rows)))
        self._last = self._block
        if blocks.last is not None:
            self._last = engine(blocks.last, self._rows(arrays, slice(self._starts[-1], None)))
        self._forms = [(o.shape, o.dtype) for o in plan.outputs]

    def _needed(self, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
        return [arrays[n.argument] for n in plan.graph.inputs]

    def _shared(self, arrays: Sequence[Any]) -> list[Any]:
        """What all blocks need."""
        if self._common is None:
            return []
        plan = self._common.plan
        return list(self._common(self._needed(plan, arrays), [None] * len(plan.outputs)))

    def _rows(self, arrays: Sequence[Any], rows: slice) -> list[Any]:
        return [a[rows] if cut else a for a, cut in zip(arrays, self._cut, strict=True)]

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """Run; `outs` holds, for each result, an array to write it to or None for a new one."""
        results = [
            self._block.empty(*form) if out is None else out for form, out in zip(self._forms, outs, strict=True)
        ]
        arrays = [*arrays, *self._shared(arrays)]
        for start in self._starts:
            rows = slice(start, start + self._starts.step)
            execute = self._last if start == self._starts[-1] else self._block
            execute(self._rows(arrays, rows), [r[rows] for r in results])
        return results
