"""Cost model of functions on the CPU: whether one runs as written, or as a plan of the NumPy engine.

As written, each NumPy call reads its operands and writes its result once, through memory where they outgrow the caches.
A plan works through blocks that stay in the caches, and its rewrites leave work out; but it cuts, copies and stores.
The costs, in seconds, are those of one core of a current server; what matters is their ratios. ``python -m benchmarks
functions`` checks the choices against measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir import graph as g
from ..ir.graph import Node
from ..ir.kinds import is_product
from ..plan.plan import Plan
from ..plan.schedule import Step
from ..plan.traced import Traced
from ..plan.views import with_views_stored
from ..trace import ASSIGNMENT, Call
from .numpy import BLOCK

GAIN = 1.3  # by which a plan must be faster to be chosen

_CALL = 0.8e-6  # of a NumPy function
_SCALAR_CALL = 0.1e-6  # of an operator on NumPy scalars, for which arrays of one element are taken too
_SCALAR_BYTES = 16  # of the largest one
_BLOCK_CALL = 3e-6  # of a NumPy call on one of several blocks
_STEP = 4e-6
_RUN = 8e-6  # of a plan, beside what running as written takes
_FLOP = {"float32": 0.06e-9, "float64": 0.11e-9}  # in the caches; FLOPs are weighted as in the operator tables
_OTHER_FLOP = 0.3e-9  # of integers and bools
_REDUCED = 0.1e-9  # an element that is reduced
_BLOCKED = 0.05e-9  # an element of a step in several blocks, which a first-level cache does not hold
_BY_COLUMNS = 1.6  # blocks of columns are not contiguous
_PRODUCT_FLOP = {"float32": 0.01e-9, "float64": 0.02e-9}  # of BLAS
_OTHER_PRODUCT_FLOP = 1e-9
_COPY = 0.1e-9  # a byte of a strided copy, by which a plan changes an order of axes
_ASSIGN = 0.025e-9  # a byte of an assignment or a copy whose rows are contiguous: the most are
_CACHE = 1 << 21  # bytes that stay in a second-level cache
_WRITE = 0.025e-9  # a byte, to a last-level cache; temporaries that are used again cost less, but not more
_FRESH = 1 << 25  # bytes of an array that is new memory each time, whose pages the system clears
_WRITE_FRESH = 0.2e-9
# An element of an operand of a library step: a guess from below, which both sides pay. More would hide what the rest
# gains, as if it were small beside the step.
_LIBRARY = 1e-9

# Seconds an element of the operands of NumPy calls whose cost is not that of the operators that they become.
_CALL_ELEMENT = {
    "logsumexp": 25e-9,  # logaddexp.reduce takes elements one by one
    "argmax": 0.06e-9,
    "argmin": 0.06e-9,
    "linalg.norm": 0.1e-9,
    "var": 0.7e-9,  # in four passes, unlike what they become here
    "std": 0.7e-9,
}
_EINSUM_FLOP = 0.06e-9  # of a contraction, which is not BLAS's
# NumPy calls that BLAS computes, whatever operators they become.
_PRODUCTS = ("matmul", "dot", "inner", "vdot", "outer", "tensordot", "linalg.multi_dot")
# Operators of views, or of what NumPy may return as a view: as written they cost nothing, which favours no plan.
_FREE = ("input", "const", "positions", "strided", "put", "copy", "library", *g.VIEWS, *g.PASS_THROUGH)


def reason_to_run_as_written(plan: Plan, traced: Traced) -> str:
    """Say why a function on the CPU runs as written; an empty string if its plan runs.

    A plan always runs where it computes something else: 16-bit floats in float32, rounded once; intermediate values
    within `max_workspace`. It also runs for functions that call this package's own operations.
    """
    nodes = list(g.topological(with_views_stored(traced.graph, traced.viewed).roots))
    if not traced.numpy_only or plan.blocks is not None:
        return ""
    # As written, arguments are put back if the function raises (`api/as_written.py`); a plan changes them at its end.
    kept = [n.nbytes for arg, n in traced.graph.effects if arg in traced.at_risk]
    if peak_bytes(nodes) + sum(kept) > plan.settings.max_workspace:
        return ""
    if any(n.dtype in ("float16", "bfloat16") for n in nodes):
        return ""
    written, planned = written_seconds(traced.calls) + sum(map(_copy_seconds, kept)), planned_seconds(plan)
    if written >= GAIN * planned:
        return ""
    return f"about {written * 1e6:.3g} us as written, {planned * 1e6:.3g} us in these steps"


def peak_bytes(nodes: Sequence[Node]) -> int:
    """Return the most bytes live at once, if nodes are computed in this order and freed after their last use."""
    last_use = {i: k for k, node in enumerate(nodes) for i in node.inputs}
    live = peak = 0
    freed: dict[int, int] = {}  # bytes by the position of their last use
    for k, node in enumerate(nodes):
        if node.op not in _FREE:
            end = last_use.get(node, len(nodes))
            freed[end] = freed.get(end, 0) + node.nbytes
            live += node.nbytes
            peak = max(peak, live)
        live -= freed.pop(k, 0)
    return peak


def written_seconds(calls: Sequence[Call]) -> float:
    """Estimate the seconds of a function's NumPy calls, one after the other."""
    return sum(map(_call_seconds, calls))


def _call_seconds(call: Call) -> float:
    """Estimate the seconds of one NumPy call as written."""
    nodes = [n for n in call.nodes if n.op not in _FREE]
    library = _library_seconds(call.nodes)
    if call.name == ASSIGNMENT:
        return (_SCALAR_CALL if call.writes <= _SCALAR_BYTES else _CALL) + (call.reads + call.writes) * _ASSIGN
    if not nodes:
        return _CALL + library
    if all(n.size == 1 and n.pointwise for n in nodes):
        return _SCALAR_CALL + library
    if call.name == "einsum" and any(map(is_product, nodes)):
        work = sum(map(g.flops, nodes)) * _EINSUM_FLOP
    elif call.name in _CALL_ELEMENT:
        work = _CALL_ELEMENT[call.name] * max(i.size for n in nodes for i in n.inputs)
    elif call.name in _PRODUCTS:
        work = sum(g.flops(n) * _PRODUCT_FLOP.get(n.dtype, _OTHER_PRODUCT_FLOP) for n in nodes)
    else:
        work = sum(map(_arithmetic_seconds, nodes))
    return _CALL + max(work, _memory_seconds(call.reads, call.writes)) + library


def planned_seconds(plan: Plan) -> float:
    """Estimate the seconds of a plan on the NumPy engine."""
    changed = sum(_copy_seconds(n.nbytes) for _, n in plan.graph.effects if n.op != "accumulate")
    return _RUN + sum(map(_step_seconds, plan.steps)) + changed


def _step_seconds(step: Step) -> float:
    """Estimate the seconds of a step on the NumPy engine."""
    memory = _memory_seconds(step.reads, step.writes)
    if step.kind == "Library":
        call = step.nodes[0].call
        copied = step.writes * (2 if call is not None and call.writes else 1)  # the results, and what it writes to
        return _STEP + _library_seconds(step.nodes) + max(memory, _copy_seconds(copied))
    if step.kind == "Copy":
        moved = sum(2 * n.nbytes for n in step.nodes if n.op == "concat") or step.reads + step.writes
        return _STEP + max(memory, moved * _COPY)
    nodes = [n for n in step.nodes if n.op not in ("input", "const", *g.VIEWS)]
    along = 0 if step.kind == "ColumnStats" else 1
    if step.domain[along] > BLOCK:  # a single row, or column, is a block that no cache holds
        memory = sum(_memory_seconds(sum(i.nbytes for i in n.inputs), n.nbytes) for n in nodes)
    blocks = -(-step.domain[0] * step.domain[1] // BLOCK)
    calls = len(nodes) * (_CALL if blocks <= 1 else blocks * _BLOCK_CALL)
    work = sum(map(_arithmetic_seconds, nodes))
    if blocks > 1:
        work += sum(n.size for n in nodes) * _BLOCKED
        work *= _BY_COLUMNS if step.kind == "ColumnStats" else 1.0
    return _STEP + calls + max(work, memory)


def _arithmetic_seconds(node: Node) -> float:
    """Estimate the seconds of an operator whose operands are in the caches."""
    flops = max(g.flops(node), node.size)
    if node.op in ("argmax", "argmin"):  # which the engine calls, too
        return _CALL_ELEMENT[node.op] * node.inputs[0].size
    if node.reduction:
        return flops * _FLOP.get(node.dtype, _OTHER_FLOP) + node.inputs[0].size * _REDUCED
    if is_product(node):
        return flops * _PRODUCT_FLOP.get(node.dtype, _OTHER_PRODUCT_FLOP)
    return flops * _FLOP.get(node.inputs[0].dtype if node.inputs else node.dtype, _OTHER_FLOP)


def _copy_seconds(nbytes: int) -> float:
    """Estimate the seconds to copy an array of so many bytes."""
    return _CALL + max(2 * nbytes * _ASSIGN, _memory_seconds(nbytes, nbytes))


def _library_seconds(nodes: Iterable[Node]) -> float:
    """Estimate the seconds of the library calls among the nodes."""
    calls = {id(n.call): n for n in nodes if n.op == "library"}  # one node for each call, whatever its results
    return sum(map(_elements, calls.values())) * _LIBRARY


def _elements(node: Node) -> int:
    """Count the elements that a library call goes through."""
    assert node.call is not None
    operands = node.inputs[1:] if node.call.indexes else node.inputs
    return sum(i.size for i in operands)


def _memory_seconds(reads: int, writes: int) -> float:
    """Estimate the seconds to write an operation's results, which dominate where its bytes outgrow the cache."""
    if reads + writes <= _CACHE:
        return 0.0
    return writes * (_WRITE if writes < _FRESH else _WRITE_FRESH)
