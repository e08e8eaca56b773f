"""Reductions down the columns in the launch that reads the same rows for something else.

The backward pass of a norm reads two matrices for the gradient of its operand, and the same two for those of its scale
and bias, which are sums down the columns. A row program that computes many rows in each block adds these up beside it,
and leaves a state of each block for a second launch to merge. Pointwise work over a domain is done where the columns of
the domain are reduced. So matrices are read once. On an H200 the backward pass of a layer norm of 32768 x 4096 bfloat16
moves 0.8 GB instead of 1.3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from .memory import base_of
from .steps import Step, step_of, with_bytes
from .tiles import state_size

# Threads that compute a row at most, columns that each has, and bytes that it holds of their states, or of a row.
_MOST_THREADS, _MOST_COLUMNS, _MOST_BYTES = 512, 16, 128
_BLOCKS = 264  # that leave states, at most: two on each multiprocessor of an H200
_WORTH = 4  # times the bytes of the states that blocks leave, which reading matrices once has to save
_FEWEST_ROWS = 512  # that blocks of a column step share; with fewer, most of a GPU would be idle
_VECTOR = 16  # bytes, of which rows are multiples: those that begin between two vectors have a launch of their own
_SHORTEST = 32  # elements of a row


class _Pair(NamedTuple):
    """A step of column reductions, and the row program whose launch takes them."""

    rows: Step
    columns: Step


def share_launches(steps: Sequence[Step], storage: dict[Node, str], results: Set[Node], on_gpu: bool) -> list[Step]:
    """Let steps of column reductions share the launch of a row program that reads the same matrices.

    Parameters
    ----------
    steps : sequence of Step
    storage : dict
        The dtype in which each value is stored.
    results : set of Node
        Values that are read after the last step.
    on_gpu : bool
        Whether kernels run the steps. NumPy computes blocks of rows that stay in a cache, and reads them twice there.

    Returns
    -------
    list of Step
        In the order of their launches.
    """
    found = list(steps)
    if not on_gpu:
        return found
    for columns in [s for s in steps if s.kind == "ColumnStats"]:
        pairs = [_Pair(rows, columns) for rows in found if _may_share(rows, columns)]
        ready = [p for p in pairs if _is_ready(p, found) and _reads_what_is_stored(p, found, storage)]
        merged = max(ready, key=lambda p: _saved_bytes(p, storage), default=None)
        if merged is not None:
            step = _merge(merged, found, storage, results)
            if step is not None:
                first = min(found.index(merged.rows), found.index(columns))
                rest = [s for s in found if s not in merged]
                found = [*rest[:first], step, *rest[first:]]
    return found


def _may_share(rows: Step, columns: Step) -> bool:
    """Whether a row program and a step of column reductions are over the same elements, which one launch may read."""
    if rows.kind != "RowProgram" or rows.domain != columns.domain or rows.columns or rows.repair_inputs:
        return False
    if columns.repair_inputs or any(n.op == "guard" for n in (*rows.nodes, *columns.nodes)):
        return False
    return bool(_read_by_both(_Pair(rows, columns)))


def _read_by_both(pair: _Pair) -> list[Node]:
    """List the matrices that column reductions read, and the row program reads or computes."""
    known = {*pair.rows.inputs, *pair.rows.outputs}
    return [n for n in pair.columns.inputs if n.shape == pair.columns.domain and n in known]


def _reads_what_is_stored(pair: _Pair, steps: Sequence[Step], storage: dict[Node, str]) -> bool:
    """Whether values that the row program has in registers may stand for those that it stores, which may be rounded.

    They may in sums, unless another step has the rounded ones beside these: what is left of them could be the
    rounding alone, as where a mean is subtracted.
    """
    rows, columns = pair
    for node in columns.inputs:
        if base_of(node) not in rows.outputs:
            continue
        if node not in rows.outputs:
            return False
        if storage[node] != dtypes.compute_dtype(node.dtype):
            summed = all(n.op == "sum" for n in columns.nodes if node in n.inputs)
            others = (s for s in steps if s not in pair and s.kind != "Gemm")
            if not summed or any(base_of(i) is node for s in others for i in (*s.inputs, *s.repair_inputs)):
                return False
    return True


def _is_ready(pair: _Pair, steps: Sequence[Step]) -> bool:
    """Whether what both steps read is in memory before the first of them, or computed by the row program."""
    numbers = {step: number for number, step in enumerate(steps)}
    first, second = sorted(pair, key=numbers.__getitem__)
    between = {o for s in steps[numbers[first] : numbers[second]] for o in s.outputs}
    if first is pair.rows:
        between -= set(first.outputs)
    return not any(base_of(i) in between for i in second.inputs)


def _saved_bytes(pair: _Pair, storage: dict[Node, str]) -> int:
    """Return the bytes of matrices that are no longer read twice."""
    return sum(n.size * dtypes.ITEMSIZE[storage[base_of(n)]] for n in _read_by_both(pair))


def _merge(pair: _Pair, steps: Sequence[Step], storage: dict[Node, str], results: Set[Node]) -> Step | None:
    """Return the step that does the work of both; None if it would gain nothing, or its states do not fit."""
    rows, columns = pair
    by_rows = any(n.reduction for n in rows.nodes)
    own, needed = _parts(columns)
    if own.keys() & (needed.keys() | rows.node_set):
        return None  # values of columns alone that both compute
    read = {base_of(i) for s in steps if s is not columns for i in (*s.inputs, *s.repair_inputs)}
    written = [n for n in rows.outputs if n in results or n in read]
    nodes = [*dict.fromkeys((*rows.nodes, *needed)), *own]
    computed = set(nodes)
    inputs = [i for i in dict.fromkeys((*rows.inputs, *columns.inputs)) if i not in computed]
    if not by_rows:
        if rows.domain[0] < _FEWEST_ROWS or any(n.shape != rows.domain for n in written):
            return None
        merged = step_of("ColumnStats", rows.domain, nodes, inputs, [*written, *columns.outputs], [])
        return with_bytes(merged, storage)
    behind = [n for n in own if not n.reduction]
    operands = dict.fromkeys(n.inputs[0] for n in own if n.reduction)
    read_behind = [i for i in columns.inputs if any(i in n.inputs for n in behind)]
    reduced = step_of("ColumnStats", columns.domain, list(own), [*operands, *read_behind], list(columns.outputs), [])
    merged = step_of("RowProgram", rows.domain, nodes, inputs, [*written, *columns.outputs], [])
    merged = with_bytes(replace(merged, columns=reduced), storage)
    return merged if _pays(merged, _saved_bytes(pair, storage), storage) else None


def _parts(columns: Step) -> tuple[dict[Node, None], dict[Node, None]]:
    """Return the reductions of a step with the work behind them, and the values that it reduces, with that before."""
    reductions = [n for n in columns.nodes if n.reduction]
    before = g.topological([n.inputs[0] for n in reductions], lambda n: _inside(columns, n))
    behind = g.topological(columns.outputs, lambda n: () if n.reduction else _inside(columns, n))
    needed, own = ({n: None for n in found if n in columns.node_set} for found in (before, behind))
    return own, needed


def _inside(step: Step, node: Node) -> Collection[Node]:
    """Return the operands of a value that a step computes."""
    return g.eager_inputs(node) if node in step.node_set else ()


def _pays(step: Step, saved: int, storage: dict[Node, str]) -> bool:
    """Whether a row program with column reductions has whole vectors, holds its states, and moves fewer bytes.

    Threads have no registers for both rows and states of float64.
    """
    assert step.columns is not None
    cols, state = step.domain[1], state_size(step.columns)
    sizes = {n: dtypes.ITEMSIZE[storage[base_of(n)]] for n in (*step.inputs, *step.outputs) if n.shape == step.domain}
    whole = all(cols * size % _VECTOR == 0 and size < dtypes.ITEMSIZE["float64"] for size in sizes.values())
    loaded = sum(size for n, size in sizes.items() if n in step.inputs)
    fits = _SHORTEST <= cols <= _MOST_THREADS * columns_of_thread(state, loaded)
    return whole and fits and saved >= _WORTH * 2 * _BLOCKS * cols * state


def columns_of_thread(state: int, loaded: int) -> int:
    """Return how many columns a thread has registers for, of so many bytes of state each, and loaded of each row."""
    return min(_MOST_COLUMNS, max(1, _MOST_BYTES // max(state, loaded)))
