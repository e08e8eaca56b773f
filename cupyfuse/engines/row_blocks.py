"""Run a plan in blocks of rows, so that intermediate values never exist for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..plan.plan import Output, Plan
from ..plan.schedule.blocks import COLUMNS, WHOLE

Engine = Callable[[Plan, Sequence[Any]], Any]  # loads a plan for arrays like those given


def load(engine: Engine, plan: Plan, arrays: Sequence[Any]) -> Any:
    """Load a plan on an engine for arrays like those given, in blocks if the plan asks for them."""
    return engine(plan, arrays) if plan.blocks is None else RowBlocks(plan, arrays, engine)


class RowBlocks:
    """A plan in blocks, loaded on an engine for arrays like those given: arguments, then prepacked values.

    Each plan of `Blocks` is loaded by itself; the blocks share one, but for a last one with fewer rows.
    """

    def __init__(self, plan: Plan, arrays: Sequence[Any], engine: Engine):
        blocks = plan.blocks
        assert blocks is not None
        self.plan, self._blocks = plan, blocks
        self._starts = range(0, blocks.total, blocks.rows)
        self._before = None if blocks.before is None else engine(blocks.before, _arguments_of(blocks.before, arrays))
        given = self._block_sources(arrays, ())
        self._common = None if blocks.common is None else engine(blocks.common, _arguments_of(blocks.common, given))
        given = self._with_common(given, ())
        self._zeros = None if blocks.zeros is None else engine(blocks.zeros, [])
        sums = self._zero_sums([None] * len(plan.outputs))
        self._block = engine(blocks.plan, [*self._cut_inputs(given, slice(0, blocks.rows)), *sums])
        self._last = self._block
        if blocks.last is not None:
            self._last = engine(blocks.last, [*self._cut_inputs(given, slice(self._starts[-1], None)), *sums])
        self._after: Any = None
        if blocks.after is not None:
            kept = [self._block.empty((blocks.total, o.node.shape[1]), o.dtype) for o in blocks.plan.outputs]
            self._after = engine(blocks.after, _arguments_of(blocks.after, [*arrays[: blocks.arguments], *kept, *sums]))

    def _block_sources(self, arrays: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """Return the arrays that blocks read, whole or in parts: arguments, and what is computed before the blocks."""
        before: list[Any] = []
        if self._before is not None:
            plan = self._before.plan
            before = self._before(_arguments_of(plan, arrays), [None] * len(plan.outputs), numbers)
        return [arrays[s.number] if s.number >= 0 else before[-1 - s.number] for s in self._blocks.sources]

    def _with_common(self, given: list[Any], numbers: Sequence[float]) -> list[Any]:
        """Compute the values that all blocks share, and append them to the arrays that blocks read."""
        if self._common is None:
            return given
        plan = self._common.plan
        return [*given, *self._common(_arguments_of(plan, given), [None] * len(plan.outputs), numbers)]

    def _cut_inputs(self, given: Sequence[Any], rows: slice) -> list[Any]:
        """Return the inputs of a block: its rows of the sources, and the common values."""
        modes = [s.mode for s in self._blocks.sources]
        return [*map(_cut, given, modes, [rows] * len(modes)), *given[len(modes) :]]

    def _zero_sums(self, outs: Sequence[Any]) -> list[Any]:
        """Return the sums at zero; those that are results, in the arrays given for results."""
        if self._zeros is None:
            return []
        sums: list[Any] = self._zeros([], [outs[k] if k >= 0 else None for k in self._blocks.summed])
        return sums

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """Run all blocks; the arguments are those of `NumpyExecutable.__call__`."""
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
        given = self._with_common(self._block_sources(arrays, numbers), numbers)
        sums = self._zero_sums([out if _is_contiguous(out) else None for out in outs])
        for k, value in zip(blocks.summed, sums, strict=True):
            if k >= 0:
                results[k] = value
        for start in self._starts:
            rows = slice(start, start + self._starts.step)
            execute = self._last if start == self._starts[-1] else self._block
            execute([*self._cut_inputs(given, rows), *sums], [r[rows] for r in kept], numbers)
        if self._after is not None:
            plan = self._after.plan
            values = [r.reshape(blocks.total, -1) for r in kept]
            after = _arguments_of(plan, [*arrays[: blocks.arguments], *values, *sums])
            found = self._after(after, [outs[k] for k in blocks.following], numbers)
            for k, value in zip(blocks.following, found, strict=True):
                results[k] = value
        for k, out in enumerate(outs):
            if out is not None and results[k] is not out:
                out[...] = results[k]
                results[k] = out
        return results


def _as_rows(output: Output, result: Any) -> Any:
    """View a result so that its first axis is the rows of all blocks."""
    return result.reshape(output.node.shape) if output.axes.folded else result


def _is_contiguous(out: Any) -> bool:
    """Whether there is an array, of NumPy, CuPy or PyTorch, and it is C-contiguous."""
    return out is not None and (out.flags.c_contiguous if hasattr(out, "flags") else out.is_contiguous())


def _cut(array: Any, mode: int, rows: slice) -> Any:
    """View the rows of an array that a block takes; along its columns if `mode` says so."""
    if mode == WHOLE:
        return array
    if array.ndim > 2:
        array = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    return array[:, rows] if mode == COLUMNS and array.ndim == 2 else array[rows]


def _arguments_of(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that a plan takes, which may be some of those given, by argument number."""
    return [arrays[n.argument] for n in plan.graph.inputs]
