"""Reductions down the columns in the launch that reads the same rows for something else.

The backward pass of a norm reads two matrices for the gradient of its operand, and the same two for those of its scale
and bias, which are sums down the columns. A row program that computes many rows in each block adds these up beside it,
and leaves a state of each block for a second launch to merge. Pointwise work over a domain is done where the columns of
the domain are reduced. So matrices are read once. On an H200 the backward pass of a layer norm of 32768 x 4096 bfloat16
moves 0.8 GB instead of 1.3. Vectors that column reductions compute anyway have no launch of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from .memory import base_of
from .steps import Step, fewest_shared, step_of, with_bytes
from .tiles import state_size

# Threads that compute a row at most, columns that each has, and bytes that it holds of their states, or of a row.
_MOST_THREADS, _MOST_COLUMNS, _MOST_BYTES = 512, 16, 128
_BLOCKS = 264  # that leave states: two on each multiprocessor of an H200, up to four of rows that take few registers
_WORTH = 2  # times the bytes of these states, written and read, which reading matrices once has to save: see `_pays`
_FEWEST_ROWS = 512  # that blocks of a column step share; with fewer, most of a GPU would be idle
_VECTOR = 16  # bytes, of which rows are multiples: those that begin between two vectors have a launch of their own
_SHORTEST = 32  # elements of a row


class _Pair(NamedTuple):
    """A row program, and a step of column reductions over the same elements."""

    rows: Step
    columns: Step


class _Parts(NamedTuple):
    """What a step of column reductions computes.

    Attributes
    ----------
    before : list of Node
        What its reductions reduce, and what that is computed from, for each element.
    after : list of Node
        The reductions, and what is computed from them, for each column.
    """

    before: list[Node]
    after: list[Node]


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
    current = list(steps)
    if not on_gpu:
        return current
    for columns in [s for s in steps if s.kind == "ColumnStats"]:
        pairs = [_Pair(rows, columns) for rows in current if _have_a_domain(rows, columns)]
        for pair in sorted(pairs, key=lambda p: -_saved_bytes(p, storage)):
            together = _together(pair, current, storage, results)
            if together is not None:
                first = min(map(current.index, pair))
                rest = [s for s in current if s not in pair]
                current = [*rest[:first], together, *rest[first:]]
                break
    return _vectors_stored_by_columns(current, storage)


def _vectors_stored_by_columns(steps: Sequence[Step], storage: dict[Node, str]) -> list[Step]:
    """Let column reductions store vectors that they compute anyway, without a launch for these alone.

    The deviation behind a batch norm's gradient is one: its sums need it for each column, its elements read it.
    """
    current = list(steps)
    for alone in [s for s in steps if s.kind == "RowProgram" and s.domain[0] == 1 and not _has_guards(s)]:
        others = [s for s in current if s is not alone]
        before = others[: _first_reader(others, alone.outputs)]
        columns = next((s for s in before if _computes(s, alone.outputs)), None)
        if columns is not None:
            outputs = [*columns.outputs, *alone.outputs]
            storing = step_of(columns.kind, columns.domain, [*columns.nodes], [*columns.inputs], outputs, [])
            current = [with_bytes(storing, storage) if s is columns else s for s in others]
    return current


def _first_reader(steps: Sequence[Step], values: Sequence[Node]) -> int:
    """Return the number of the first step that reads one of these values, or a view of it; else how many there are."""
    read = ({base_of(i) for i in (*s.inputs, *s.repair_inputs)} for s in steps)
    return next((k for k, bases in enumerate(read) if not bases.isdisjoint(values)), len(steps))


def _computes(step: Step, vectors: Sequence[Node]) -> bool:
    """Whether column reductions compute these values for each of their columns."""
    fit = all(n.shape == (1, step.domain[1]) for n in vectors)
    return step.kind == "ColumnStats" and fit and step.node_set.issuperset(vectors) and not _has_guards(step)


def _have_a_domain(rows: Step, columns: Step) -> bool:
    """Whether a row program is over the elements of a step of column reductions, and both are plain work."""
    alone = rows.kind == "RowProgram" and rows.columns is None
    return alone and rows.domain == columns.domain and not (_has_guards(rows) or _has_guards(columns))


def _has_guards(step: Step) -> bool:
    return bool(step.repair_inputs) or any(n.op == "guard" for n in step.nodes)


def guards_keep_apart(steps: Sequence[Step]) -> bool:
    """Whether guards may be why a row program and column reductions over the same elements have two launches."""
    rows = {s.domain for s in steps if s.kind == "RowProgram" and s.columns is None}
    both = rows & {s.domain for s in steps if s.kind == "ColumnStats"}
    return any(s.domain in both and _has_guards(s) for s in steps if s.kind in ("RowProgram", "ColumnStats"))


def _read_by_both(pair: _Pair) -> list[Node]:
    """List the matrices that column reductions read, and the row program reads or computes."""
    known = {*pair.rows.inputs, *pair.rows.outputs}
    return [n for n in pair.columns.inputs if n.shape == pair.columns.domain and n in known]


def _saved_bytes(pair: _Pair, storage: dict[Node, str]) -> int:
    """Return the bytes of matrices that would no longer be read twice."""
    return sum(n.size * dtypes.ITEMSIZE[storage[base_of(n)]] for n in _read_by_both(pair))


def _together(pair: _Pair, steps: Sequence[Step], storage: dict[Node, str], results: Set[Node]) -> Step | None:
    """Return the step that does the work of both; None if it cannot, or would gain nothing."""
    if not (_read_by_both(pair) and _is_ready(pair, steps) and _may_skip_rounding(pair, steps, storage)):
        return None
    rows, columns = pair
    parts = _parts_of(columns, rows.inputs)
    if not set(parts.after).isdisjoint((*parts.before, *rows.nodes)):
        return None  # a value that rows and columns both compute, as exp(w) in exp(w) * sum(x exp(w))
    read = {base_of(i) for s in steps if s is not columns for i in (*s.inputs, *s.repair_inputs)}
    written = [n for n in rows.outputs if n in results or n in read]
    nodes = [*dict.fromkeys((*rows.nodes, *parts.before)), *parts.after]
    needed = {i for n in nodes for i in n.inputs}.difference(nodes)
    inputs = [i for i in dict.fromkeys((*rows.inputs, *columns.inputs)) if i in needed]
    outputs = [*written, *columns.outputs]
    if any(n.reduction for n in rows.nodes):
        step = step_of("RowProgram", rows.domain, nodes, inputs, outputs, [])
        step = with_bytes(replace(step, columns=_reducing(step, columns, parts)), storage)
        return step if _pays(step, _saved_bytes(pair, storage), storage) else None
    enough = rows.domain[0] >= max(_FEWEST_ROWS, fewest_shared(rows.domain[1]))
    elements = all(n.shape == rows.domain for n in written) and enough
    step = with_bytes(step_of("ColumnStats", rows.domain, nodes, inputs, outputs, []), storage)
    return step if elements and _has_whole_vectors(step, storage) else None


def _is_ready(pair: _Pair, steps: Sequence[Step]) -> bool:
    """Whether what both steps read is in memory before the first of them, or computed by the row program."""
    numbers = {step: number for number, step in enumerate(steps)}
    first, second = sorted(pair, key=numbers.__getitem__)
    between = {o for s in steps[numbers[first] : numbers[second]] for o in s.outputs}
    if first is pair.rows:
        between -= set(first.outputs)
    return not any(base_of(i) in between for i in second.inputs)


def _may_skip_rounding(pair: _Pair, steps: Sequence[Step], storage: dict[Node, str]) -> bool:
    """Whether values that the row program has in registers may stand for those that it stores, which may be rounded.

    They may in sums, unless another step reads the rounded ones, products aside: what is left of them could be the
    rounding alone, as where a mean is subtracted.
    """
    rows, columns = pair
    for node in columns.inputs:
        if base_of(node) not in rows.outputs:
            continue
        if node not in rows.outputs:  # a view
            return False
        if storage[node] == dtypes.compute_dtype(node.dtype):
            continue
        if any(n.op != "sum" for n in columns.nodes if node in n.inputs):
            return False
        if any(_reads_elements(s, node) for s in steps if s not in pair):
            return False
    return True


def _reads_elements(step: Step, node: Node) -> bool:
    """Whether a step reads a matrix for more than a product with it."""
    if step.kind == "Gemm":
        return step.epilogue is not None and node in map(base_of, step.epilogue.inputs)
    return node in map(base_of, (*step.inputs, *step.repair_inputs))


def _parts_of(columns: Step, given: Collection[Node]) -> _Parts:
    """Take a step of column reductions apart; `given` values are in memory, also where the step computes them."""
    computed = columns.node_set.difference(given)

    def inside(node: Node) -> Collection[Node]:
        return g.eager_inputs(node) if node in computed else ()

    after = list(g.topological(columns.outputs, lambda n: () if n.reduction else inside(n)))
    before = g.topological([n.inputs[0] for n in after if n.reduction and n in computed], inside)
    return _Parts(*([n for n in found if n in computed] for found in (before, after)))


def _reducing(together: Step, columns: Step, parts: _Parts) -> Step:
    """Return what is left of a step of column reductions beside a row program that computes what these reduce."""
    operands = dict.fromkeys(n.inputs[0] for n in parts.after if n.reduction)
    read = [i for i in together.inputs if any(i in n.inputs for n in parts.after if not n.reduction)]
    return step_of("ColumnStats", columns.domain, parts.after, [*operands, *read], list(columns.outputs), [])


def _sizes(step: Step, storage: dict[Node, str]) -> dict[Node, int]:
    """Return the bytes of an element of each matrix that a step reads or writes."""
    matrices = (n for n in (*step.inputs, *step.outputs) if n.shape == step.domain)
    return {n: dtypes.ITEMSIZE[storage[base_of(n)]] for n in matrices}


def _has_whole_vectors(step: Step, storage: dict[Node, str]) -> bool:
    return all(step.domain[1] * size % _VECTOR == 0 for size in _sizes(step, storage).values())


def _pays(step: Step, saved: int, storage: dict[Node, str]) -> bool:
    """Whether a row program with column reductions has whole vectors, holds its states, and moves fewer bytes.

    Threads have no registers for both rows and states of float64. Of 60 backward passes of norms and of an affine
    softmax, 1024 to 16384 rows of 1024 to 8192 columns, on an H200, those that pay take 0.64 to 1.02 times as long
    together as apart, and those that do not 0.95 to 2.1 times.
    """
    assert step.columns is not None
    cols, state, sizes = step.domain[1], state_size(step.columns), _sizes(step, storage)
    widest = max(sizes.values(), default=0)
    loaded = sum(size for n, size in sizes.items() if n in step.inputs)
    holds = widest < dtypes.ITEMSIZE["float64"] and _VECTOR // max(1, widest) * max(state, loaded) <= _MOST_BYTES
    fits = _SHORTEST <= cols <= _MOST_THREADS * columns_of_thread(state, loaded)
    worth = saved >= _WORTH * 2 * _BLOCKS * cols * state
    return _has_whole_vectors(step, storage) and holds and fits and worth


def columns_of_thread(state: int, loaded: int) -> int:
    """Return how many columns a thread has registers for, of so many bytes of state each, and loaded of each row.

    It is a power of two, as the elements of a vector are.
    """
    most = min(_MOST_COLUMNS, max(1, _MOST_BYTES // max(1, state, loaded)))
    return 1 << (most.bit_length() - 1)
