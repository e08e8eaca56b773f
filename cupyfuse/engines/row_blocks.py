"""Run a plan in blocks on either engine: load the plans of its blocks, and call them in turn.

Rows are what blocks have: columns of the matrices that are cut, where `Blocks.transposed` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..plan.plan import Output, Plan
from ..plan.schedule.cut import COLUMNS, WHOLE

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
        self._no_outs = [None] * len(plan.outputs)
        self._starts = range(0, blocks.total, blocks.rows)
        self._before = None if blocks.before is None else engine(blocks.before, _arguments_of(blocks.before, arrays))
        before = _results_like(self._before)  # not computed: that may take numbers of a call
        given = self._block_sources(arrays, before)
        self._common = None if blocks.common is None else engine(blocks.common, _arguments_of(blocks.common, given))
        given = [*given, *_results_like(self._common)]
        self._zeros = None if blocks.zeros is None else engine(blocks.zeros, [])
        sums = self._zero_sums(self._no_outs)
        self._block = engine(blocks.plan, [*self._cut_inputs(given, slice(0, blocks.rows)), *sums])
        self._last = self._block
        if blocks.last is not None:
            self._last = engine(blocks.last, [*self._cut_inputs(given, slice(self._starts[-1], None)), *sums])
        self._after: Any = None
        if blocks.after is not None:
            collected = map(self._empty_rows, blocks.plan.outputs)
            after = _arguments_of(blocks.after, [*arrays[: blocks.arguments], *collected, *sums, *before])
            self._after = engine(blocks.after, after)

    def _run_before(self, arrays: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """Compute what precedes the blocks."""
        if self._before is None:
            return []
        found: list[Any] = self._before(_arguments_of(self._before.plan, arrays), None, numbers)
        return found

    def _block_sources(self, arrays: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        """Return the arrays that blocks read, whole or in parts: arguments, and what is computed before the blocks."""
        found = ((before if s.before else arrays)[s.number] for s in self._blocks.sources)
        return [a.reshape(s.shape) if s.shape else a for a, s in zip(found, self._blocks.sources, strict=True)]

    def _with_common(self, given: list[Any], numbers: Sequence[float]) -> list[Any]:
        """Compute the values that all blocks share, and append them to the arrays that blocks read."""
        if self._common is None:
            return given
        return [*given, *self._common(_arguments_of(self._common.plan, given), None, numbers)]

    def _cut_inputs(self, given: Sequence[Any], rows: slice) -> list[Any]:
        """Return the inputs of a block: its rows of the sources, and the common values."""
        modes = [s.mode for s in self._blocks.sources]
        return [*map(_cut, given, modes, [rows] * len(modes)), *given[len(modes) :]]

    def _zero_sums(self, outs: Sequence[Any]) -> list[Any]:
        """Return the sums at zero; those that are results, in the arrays given for results."""
        if self._zeros is None:
            return []
        sums: list[Any] = self._zeros([], [None if k is None else outs[k] for k in self._blocks.summed])
        return sums

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, numbers: Sequence[float] = ()
    ) -> list[Any]:
        """Run all blocks; the arguments are those of `NumpyExecutable.__call__`."""
        outs = self._no_outs if outs is None else outs
        results = list(outs)
        collected = self._allocate_collected(outs, results)
        before = self._run_before(arrays, numbers)
        given = self._with_common(self._block_sources(arrays, before), numbers)
        sums = self._zero_sums([out if _is_contiguous(out) else None for out in outs])
        for k, value in zip(self._blocks.summed, sums, strict=True):
            if k is not None:
                results[k] = value
        self._run_blocks(given, collected, sums, numbers)
        after = self._run_after(arrays, collected, [*sums, *before], outs, numbers)
        for k, value in zip(self._blocks.following, after, strict=True):
            results[k] = value
        return _copy_to_outs(results, outs)

    def _allocate_collected(self, outs: Sequence[Any], results: list[Any]) -> list[Any]:
        """Return the arrays whose rows the blocks write; those that are results also become such.

        Blocks write to an array of `outs` if its rows can be sliced.
        """
        blocks, collected = self._blocks, []
        for k, block_output in zip(blocks.collected, blocks.plan.outputs, strict=True):
            if k is None:
                collected.append(self._empty_rows(block_output))
                continue
            output, out = self.plan.outputs[k], outs[k]
            if out is None or (output.axes.folded and not _is_contiguous(out)):
                results[k] = self._block.empty(output.shape, output.dtype)
            collected.append(_as_rows(output, results[k]))
        return collected

    def _empty_rows(self, output: Output) -> Any:
        """Allocate an array for the rows that all blocks write of one output."""
        return self._block.empty((self._blocks.total, output.node.shape[1]), output.dtype)

    def _run_blocks(
        self, given: Sequence[Any], collected: Sequence[Any], sums: Sequence[Any], numbers: Sequence[float]
    ) -> None:
        """Run one block after the other: each writes its rows of the collected values, and adds to the sums."""
        for start in self._starts:
            rows = slice(start, start + self._blocks.rows)
            execute = self._last if start == self._starts[-1] else self._block
            execute([*self._cut_inputs(given, rows), *sums], [array[rows] for array in collected], numbers)

    def _run_after(
        self,
        arrays: Sequence[Any],
        collected: Sequence[Any],
        others: Sequence[Any],
        outs: Sequence[Any],
        numbers: Sequence[float],
    ) -> Sequence[Any]:
        """Compute the results `Blocks.following`, which need all blocks; `others` are the sums, then what precedes."""
        if self._after is None:
            return []
        blocks, plan = self._blocks, self._after.plan
        matrices = [array.reshape(blocks.total, -1) for array in collected]
        given = _arguments_of(plan, [*arrays[: blocks.arguments], *matrices, *others])
        found: Sequence[Any] = self._after(given, [outs[k] for k in blocks.following], numbers)
        return found


def _results_like(execute: Any) -> list[Any]:
    """Return arrays like the results of a plan that is loaded; none if there is no plan."""
    return [] if execute is None else [execute.empty(o.shape, o.dtype) for o in execute.plan.outputs]


def _copy_to_outs(results: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Copy results to the arrays given for them where they are not there yet; return each result."""
    found = []
    for result, out in zip(results, outs, strict=True):
        if out is not None and result is not out:
            out[...] = result
        found.append(result if out is None else out)
    return found


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
