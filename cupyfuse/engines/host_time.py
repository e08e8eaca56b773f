"""What a function takes on the CPU: as written, and as a plan of the NumPy engine. The faster of the two runs.

As written, each NumPy call reads its operands and writes its result once, through memory where they outgrow the caches.
A plan works through blocks that stay in the caches, and its rewrites leave work out; but it cuts, copies and stores.
The prices, in seconds, are those of one core of a current server; what matters is their ratios. ``python -m benchmarks
functions`` checks the choices against measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir import graph as g
from ..ir.graph import Node
from ..plan.plan import Plan, Traced
from ..plan.schedule import Step
from ..trace import Call
from .numpy import BLOCK

GAIN = 1.3  # by which a plan must be faster to be chosen

_CALL = 0.8e-6  # of NumPy
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
_COPY = 0.1e-9  # a byte of a strided copy
_CACHE = 1 << 21  # bytes that stay in a second-level cache
_WRITE = 0.025e-9  # a byte, to a last-level cache; temporaries that are used again cost less, but not more
_FRESH = 1 << 25  # bytes of an array that is new memory each time, whose pages the system clears
_WRITE_FRESH = 0.2e-9
_LIBRARY = 10e-9  # an element of an operand of a library step: a guess from below, which both sides pay

# NumPy calls that cost another number of seconds an element of their operands than what they become in the graph.
_OF_NUMPY = {
    "logsumexp": 25e-9,  # logaddexp.reduce takes elements one by one
    "argmax": 0.06e-9,
    "argmin": 0.06e-9,
    "linalg.norm": 0.1e-9,
}
_EINSUM_FLOP = 0.06e-9  # of a contraction, which is not BLAS's
# Products of NumPy are BLAS's, whatever they become in the graph.
_PRODUCTS = ("matmul", "dot", "inner", "vdot", "outer", "tensordot", "linalg.multi_dot")
# Views, and what NumPy may take as views: they cost nothing as written, so that no estimate favours the plan.
_FREE = ("input", "const", "positions", "strided", "put", "copy", "library", *g.VIEWS, *g.PASS_THROUGH)


def reason_to_run_as_written(plan: Plan, traced: Traced) -> str:
    """Say why a function on the CPU runs as written; an empty string if its plan runs.

    A plan always runs where it computes something else: 16-bit floats in float32, rounded once; intermediate values
    within `max_workspace`; changes of arguments once library steps that may fail are done. It also runs for functions
    that call this package's own operations.
    """
    nodes = list(g.topological(traced.graph.roots))
    may_fail = any(n.op == "library" for n in nodes)
    if not traced.numpy_only or (traced.graph.effects and may_fail) or plan.blocks is not None:
        return ""
    if any(n.dtype in ("float16", "bfloat16") for n in nodes) or live_bytes(nodes) > plan.settings.max_workspace:
        return ""
    written, planned = written_seconds(traced.calls), planned_seconds(plan)
    if written >= GAIN * planned:
        return ""
    return f"about {written * 1e6:.3g} us as written, {planned * 1e6:.3g} us in these steps"


def live_bytes(nodes: Sequence[Node]) -> int:
    """Return the most bytes of values that are computed and still to be read, in the order of the code."""
    last = {i: k for k, node in enumerate(nodes) for i in node.inputs}
    live = most = 0
    dying: dict[int, int] = {}
    for k, node in enumerate(nodes):
        if node.op not in _FREE:
            end = last.get(node, len(nodes))
            dying[end] = dying.get(end, 0) + node.nbytes
            live += node.nbytes
            most = max(most, live)
        live -= dying.pop(k, 0)
    return most


def written_seconds(calls: Sequence[Call]) -> float:
    """Estimate the time of NumPy calls one by one."""
    return sum(map(_call_seconds, calls))


def _call_seconds(call: Call) -> float:
    nodes = [n for n in call.nodes if n.op not in _FREE]
    library = _library_seconds(call.nodes)
    if not nodes:
        return _CALL + library
    if call.name == "einsum" and any(map(g.is_product, nodes)):
        work = sum(map(g.flops, nodes)) * _EINSUM_FLOP
    elif call.name in _OF_NUMPY:
        work = _OF_NUMPY[call.name] * max(i.size for n in nodes for i in n.inputs)
    elif call.name in _PRODUCTS:
        work = sum(g.flops(n) * _PRODUCT_FLOP.get(n.dtype, _OTHER_PRODUCT_FLOP) for n in nodes)
    else:
        work = sum(map(_arithmetic, nodes))
    return _CALL + max(work, _memory(call.reads, call.writes)) + library


def planned_seconds(plan: Plan) -> float:
    """Estimate the time of a plan's steps on the NumPy engine."""
    return _RUN + sum(map(_step_seconds, plan.steps))


def _step_seconds(step: Step) -> float:
    memory = _memory(step.reads, step.writes)
    if step.kind == "Library":
        return _STEP + _library_seconds(step.nodes) + memory
    if step.kind == "Copy":
        return _STEP + max(memory, (step.reads + step.writes) * _COPY)
    nodes = [n for n in step.nodes if n.op not in ("input", "const", *g.VIEWS)]
    along = 0 if step.kind == "ColumnStats" else 1
    if step.domain[along] > BLOCK:  # one row, or column, is a block that no cache holds
        memory = sum(_memory(sum(i.nbytes for i in n.inputs), n.nbytes) for n in nodes)
    blocks = -(-step.domain[0] * step.domain[1] // BLOCK)
    calls = len(nodes) * (_CALL if blocks <= 1 else blocks * _BLOCK_CALL)
    work = sum(map(_arithmetic, nodes))
    if blocks > 1:
        work += sum(n.size for n in nodes) * _BLOCKED
        work *= _BY_COLUMNS if step.kind == "ColumnStats" else 1.0
    return _STEP + calls + max(work, memory)


def _arithmetic(node: Node) -> float:
    flops = max(g.flops(node), node.size)
    if node.reduction:
        return flops * _FLOP.get(node.dtype, _OTHER_FLOP) + node.inputs[0].size * _REDUCED
    if g.is_product(node):
        return flops * _PRODUCT_FLOP.get(node.dtype, _OTHER_PRODUCT_FLOP)
    return flops * _FLOP.get(node.inputs[0].dtype if node.inputs else node.dtype, _OTHER_FLOP)


def _library_seconds(nodes: Iterable[Node]) -> float:
    calls = {id(n.call): n for n in nodes if n.op == "library"}  # each once, however many results it has
    return sum(i.size for n in calls.values() for i in n.inputs) * _LIBRARY


def _memory(reads: int, writes: int) -> float:
    if reads + writes <= _CACHE:
        return 0.0
    return writes * (_WRITE if writes < _FRESH else _WRITE_FRESH)
