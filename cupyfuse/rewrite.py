"""The algebra: one function for each identity, and the order in which they are tried.

A rewrite is a promise. Each docstring states the identity, for which values it is exact, and what it saves. Where a
rewritten value could differ from the written one for ±inf or NaN, the result is wrapped in `guard(fast, exact)`: the
rewritten value where it is finite, otherwise the value as written, evaluated on the device for just those elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import dtypes
from . import graph as g
from .graph import Graph, Node
from .operators import REDUCTIONS


@dataclass(frozen=True)
class Note:
    """One rewrite that was applied: which identity, to what, and what it saves."""

    identity: str
    what: str
    saved: str


@dataclass(frozen=True)
class Term:
    """`row * col * base`: a per-row and a per-column factor (or None) times a full value (or None for 1)."""

    row: Node | None
    col: Node | None
    base: Node | None


# Clean-up -----------------------------------------------------------------------------------------------------------


def share_common_subexpressions(graph: Graph) -> Graph:
    """Equal operators on equal operands are computed once. Exact."""
    seen: dict[tuple[object, ...], Node] = {}

    def rule(node: Node) -> Node:
        key = (node.op, node.inputs, node.shape, node.dtype, tuple(sorted((k, repr(v)) for k, v in node.attrs.items())))
        return seen.setdefault(key, node)

    return g.rewrite(graph, rule)


def drop_empty_casts(node: Node) -> Node:
    """A cast to the dtype and shape that a value has already is that value. Exact."""
    if node.op == "cast" and node.inputs[0].op != "const":
        source = node.inputs[0]
        if source.dtype == node.dtype and source.shape == node.shape:
            return source
    return node


def cancel_transposes(node: Node) -> Node:
    """The transpose of a transpose, and any reshape of a reshape, is one view. Exact."""
    if node.op == "transpose" and node.inputs[0].op == "transpose":
        return node.inputs[0].inputs[0]
    if node.op == "reshape" and node.inputs[0].op == "reshape":
        return g.reshape(node.inputs[0].inputs[0], node.shape)
    return node


def push_transposes(node: Node) -> Node:
    """The transpose of a pointwise function of vectors is that function of the transposed vectors. Exact.

    Arguments can be read either way at no cost, computed values would have to be stored first.
    """
    if node.op != "transpose" or not node.inputs[0].pointwise or 1 not in node.shape:
        return node
    inner = node.inputs[0]
    if inner.op == "guard" and inner.inputs[1].reduction:
        return node
    turned = tuple(i if i.shape == (1, 1) else push_transposes(g.transpose(i)) for i in inner.inputs)
    return Node(inner.op, turned, node.shape, inner.dtype, inner.attrs)


def reduction_over_one(node: Node) -> Node:
    """A reduction along an axis of length 1 is the identity.

    sum, product, mean, max, min and logsumexp of one element are that element, ±inf and NaN included. The sum of
    exponentials relative to the largest is exp(x - x): 1, or NaN for ±inf and NaN. The second moment is (x - x)^2.
    Saves the whole reduction.
    """
    if not node.reduction or node.inputs[0].shape[node.axis] != 1:
        return node
    x = node.inputs[0]
    if REDUCTIONS[node.op].identity_on_one:
        return x
    difference = g.pointwise("subtract", x, x)
    return g.pointwise("exp" if node.op == "expsum" else "square", difference)


# Composites ---------------------------------------------------------------------------------------------------------


def lower_mean(node: Node) -> Node:
    """mean(x) = sum(x) / n, the division last as NumPy does it. Exact."""
    if node.op != "mean":
        return node
    x = node.inputs[0]
    count = g.const(float(x.shape[node.axis]))
    if node.axis == 0:
        # The number of rows changes from call to call: a named constant is a parameter of the emitted kernel.
        count.attrs["name"] = "row_count"
    return g.pointwise("divide", g.reduce("sum", x, node.axis), count)


def lower_logsumexp(node: Node) -> Node:
    """logsumexp(x) = m + log(sum(exp(x - m))) with m = max(x); m itself where it is not finite.

    Gives +inf for a row with +inf, -inf for a row of -inf, NaN for a row with NaN. The two reductions share one pass.
    """
    if node.op != "logsumexp":
        return node
    x = node.inputs[0]
    top, total = g.reduce("max", x, node.axis), g.reduce("expsum", x, node.axis)
    return g.pointwise("add", g.pointwise("finite_or_zero", top), g.pointwise("log_relative", top, total))


def recognize_expsum(node: Node) -> Node:
    """sum(exp(x - max(x))), written out as in a softmax, is one reduction with the maximum instead of one after it.

    Exact; ±inf and NaN included, for which both are NaN. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "exp":
        return node
    difference = node.inputs[0].inputs[0]
    if difference.op != "subtract":
        return node
    x, top = difference.inputs
    same = top.op == "max" and top.axis == node.axis and top.inputs[0] is x and x.dtype == node.dtype
    return g.reduce("expsum", x, node.axis) if same else node


def drop_needless_guards(graph: Graph) -> Graph:
    """Where the exact form is computed anyway, it is the value. Exact."""
    live = set(g.topological(graph.roots, g.eager_inputs))

    def rule(node: Node, original: Node) -> Node:
        return node.inputs[1] if node.op == "guard" and original.inputs[1] in live else node

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = tuple(done[i] for i in node.inputs)
        same = all(a is b for a, b in zip(inputs, node.inputs, strict=True))
        done[node] = rule(node if same else Node(node.op, inputs, node.shape, node.dtype, node.attrs), node)
    return graph.replace(done)


def convert_matmul_operands(node: Node) -> Node:
    """matmul(a, b) in the promoted dtype converts its operands first, as NumPy does. Exact."""
    if node.op != "matmul":
        return node

    def converted(operand: Node) -> Node:
        if operand.dtype == node.dtype:
            return operand
        if operand.op == "transpose":
            return g.transpose(g.cast(operand.inputs[0], node.dtype))
        return g.cast(operand, node.dtype)

    a, b = (converted(i) for i in node.inputs)
    return node if (a, b) == node.inputs else Node("matmul", (a, b), node.shape, node.dtype, node.attrs)


# Linear maps --------------------------------------------------------------------------------------------------------


def linear_terms(value: Node, rows: int, cols: int) -> list[Term]:
    """Write a full value as a sum of terms, each linear in one full value."""
    products = _above_matmul([value])
    shape = (rows, cols)

    def full(node: Node) -> bool:
        return node.shape == shape and (rows != 1 or node in products)

    def linear_inputs(node: Node) -> tuple[Node, ...]:
        if not full(node) or node.op not in ("add", "subtract", "negative", "multiply", "divide"):
            return ()
        if node.op == "divide":
            return () if full(node.inputs[1]) or not full(node.inputs[0]) else node.inputs[:1]
        if node.op == "multiply":
            return () if all(map(full, node.inputs)) else tuple(i for i in node.inputs if full(i))
        return node.inputs

    found: dict[Node, list[Term]] = {}
    for node in g.topological([value], linear_inputs):
        inner = linear_inputs(node)
        if not inner:
            found[node] = [_single_term(node, full(node))]
        elif node.op == "negative":
            found[node] = [_scaled(t, g.const(-1.0)) for t in found[inner[0]]]
        elif node.op in ("add", "subtract"):
            left, right = (found[i] for i in node.inputs)
            found[node] = left + (right if node.op == "add" else [_scaled(t, g.const(-1.0)) for t in right])
        else:
            factor = node.inputs[1] if node.inputs[0] is inner[0] else node.inputs[0]
            found[node] = [_scaled(t, _widened(factor, node.dtype), node.op) for t in found[inner[0]]]
    return found[value]


def _widened(factor: Node, dtype: str) -> Node:
    """A factor in the dtype of the product it belongs to, in which it would have been used."""
    return factor if factor.op == "const" else drop_empty_casts(g.cast(factor, dtype))


def _widened_term(term: Term, dtype: str) -> Term:
    """A term in the dtype of the sum it belongs to; a matrix product has it, or was converted as written."""
    row, col, base = term.row, term.col, term.base
    return Term(
        None if row is None else _widened(row, dtype),
        None if col is None else _widened(col, dtype),
        base if base is None or base.op == "matmul" else _widened(base, dtype),
    )


def _single_term(node: Node, full: bool) -> Term:
    if full:
        return Term(None, None, node)
    return Term(None, node, None) if node.shape[0] == 1 else Term(node, None, None)


def _above_matmul(roots: Iterable[Node]) -> set[Node]:
    """The nodes that need a matrix product."""
    found: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        if node.op == "matmul" or any(i in found for i in g.eager_inputs(node)):
            found.add(node)
    return found


def _scaled(term: Term, factor: Node, op: str = "multiply") -> Term:
    if factor.shape[0] != 1:
        return Term(_combine(op, term.row, factor), term.col, term.base)
    return Term(term.row, _combine(op, term.col, factor), term.base)


def _combine(op: str, coefficient: Node | None, factor: Node) -> Node:
    """One more factor, or divisor, of a coefficient; NaN where their product underflows, so that guards notice."""
    if coefficient is None and op == "multiply":
        return factor
    return g.pointwise(f"safe_{op}", g.const(1.0) if coefficient is None else coefficient, factor)


def _product(*factors: Node | None) -> Node | None:
    result: Node | None = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else g.pointwise("multiply", result, factor)
    return result


def _total(terms: list[Node]) -> Node:
    result = terms[0]
    for term in terms[1:]:
        result = g.pointwise("add", result, term)
    return result


def collapse_sum(node: Node) -> Node:
    """sum_j (x W)_ij a_j = x (W a): the sum of a linear map is a matrix-vector product.

    `W a` is one weighted sum over the weight (prepared once for bound weights); adding constants and per-row or
    per-column terms carries through. For finite results exact up to rounding; a row that comes out infinite or NaN is
    evaluated as written (guard). Finite inputs whose product overflows in one column and is cancelled by another come
    out finite here and infinite or NaN as written. Saves the GEMM: 2 R K C floating-point operations become 2 R K.
    """
    if node.op != "sum" or node.axis != 1:
        return node
    x = node.inputs[0]
    rows, cols = x.shape
    terms = linear_terms(x, rows, cols)
    if not any(t.base is not None and t.base.op == "matmul" for t in terms):
        return node
    fast = g.cast(_total([_summed(_widened_term(t, node.dtype), cols) for t in terms]), node.dtype)
    return g.guard(fast, node)


def _summed(term: Term, cols: int) -> Node:
    """The sum over the columns of one term."""
    if term.base is None:
        if term.col is None:
            inner = g.const(float(cols))
        elif term.col.shape[1] == 1:
            inner = g.pointwise("multiply", term.col, g.const(float(cols)))
        else:
            inner = g.reduce("sum", term.col, 1)
    elif term.base.op == "matmul":
        inner = _matvec(term.base, term.col)
    else:
        inner = g.reduce("sum", _known(_product(term.base, term.col)), 1)
    return _known(_product(inner, term.row))


def _known(node: Node | None) -> Node:
    assert node is not None
    return node


def _matvec(product: Node, weights: Node | None) -> Node:
    """sum_j product[:, j] * weights[j] as a matrix-vector product."""
    a, b = product.inputs
    scalar = weights if weights is not None and weights.shape == (1, 1) and b.shape[1] != 1 else None
    if scalar is not None:
        weights = None
    if b.op == "transpose":
        base = b.inputs[0]
        weighted = base if weights is None else g.pointwise("multiply", base, g.transpose(weights))
        vector = g.reduce("sum", weighted, 0) if base.shape[0] != 1 else weighted
    else:
        weighted = b if weights is None else g.pointwise("multiply", b, weights)
        vector = g.transpose(g.reduce("sum", weighted, 1) if b.shape[1] != 1 else weighted)
    if a.shape[1] == 1:
        dot = g.pointwise("multiply", a, vector)
    else:
        dot = g.reduce("sum", g.pointwise("multiply", a, vector), 1)
    return _known(_product(dot, scalar))


def pool_weights(node: Node) -> Node:
    """The average pool of a linear map is the linear map of the pooled weights: pool(x W + b) = x pool(W) + pool(b).

    Pooled weights are prepared once where they are bound. Agrees to rounding for finite values. A group of columns that
    as written would hold an infinity beside a NaN or the opposite infinity can come out infinite here instead of NaN,
    since the weights of the group have met first. Saves all but one in `width` of the GEMM's columns.
    """
    pooled = _pooled(node)
    if pooled is None:
        return node
    value, width = pooled
    terms = linear_terms(value, *value.shape)
    products = [t for t in terms if t.base is not None]
    linear = bool(products) and all(t.base is not None and t.base.op == "matmul" for t in products)
    scalar = all(t.col is None or t.col.shape == (1, 1) for t in products)
    if not linear or not scalar:
        return node
    return g.cast(_total([_pooled_term(_widened_term(t, node.dtype), width) for t in terms]), node.dtype)


def _pooled(node: Node) -> tuple[Node, int] | None:
    """The value and the width of an average pool, as `graph.average_pool` builds it."""
    if node.op != "reshape" or node.inputs[0].op != "mean" or node.inputs[0].inputs[0].op != "reshape":
        return None
    groups = node.inputs[0].inputs[0]
    value, width = groups.inputs[0], groups.shape[1]
    right = node.inputs[0].axis == 1 and node.shape == (value.shape[0], value.shape[1] // max(width, 1))
    return (value, width) if right and width > 1 else None


def _pooled_term(term: Term, width: int) -> Node:
    if term.base is not None:
        a, b = term.base.inputs
        # Shares are summed, not sums shared: weights near the largest number do not overflow on the way.
        share = g.pointwise("multiply", b, g.const(1.0 / width))
        rows, cols = b.shape
        groups = g.reduce("sum", g.reshape(share, (rows * cols // width, width)), 1)
        return _known(_product(g.matmul(a, g.reshape(groups, (rows, cols // width))), term.col, term.row))
    col = term.col
    if col is not None and col.shape[1] > 1:
        col = g.average_pool(col, width)
    return _known(_product(col, term.row))


def fold_affine(node: Node, varying: set[Node] | None = None) -> Node:
    """Per-column multiply-adds are one: ((y + b - m) r g + t) s = y a + c.

    After a matrix product, bias, BatchNorm and scales become a = r g s and c = ((b - m) r g + t) s, one pair a column
    (prepared once where they depend on bound arrays alone). Of any other y, whose rounding errors are not already those
    of a product, the first shifts stay as written, since cancellation could cost digits: (y - m) a + c. Agrees to
    rounding; an element that comes out infinite or NaN is evaluated as written (guard), as is one whose factors would
    underflow. Saves the loads and the arithmetic of every step but one.
    """
    chain, inner = affine_chain(node, varying)
    if inner.op != "matmul":
        while chain and chain[-1].op in ("add", "subtract"):
            inner = chain.pop()
    # Adding a number and taking one away again is how rounding is asked for: (x + 2**23) - 2**23.
    numbers = [s for s in chain if s.op in ("add", "subtract") and any(i.op == "const" for i in s.inputs)]
    if len(chain) < 3 or len(numbers) > 1:
        return node
    scale: Node | None = None
    shift: Node | None = None
    value = inner
    for step in reversed(chain):
        other = next((_widened(i, step.dtype) for i in step.inputs if i is not value), None)
        scale, shift = _affine_step(step, value, other, scale, shift)
        value = step
    fast = inner if scale is None else g.pointwise("multiply", inner, scale)
    if shift is not None:
        fast = g.pointwise("add", fast, shift)
    return g.guard(g.cast(fast, node.dtype), node)


def _affine_step(
    step: Node, value: Node, other: Node | None, scale: Node | None, shift: Node | None
) -> tuple[Node | None, Node | None]:
    """The factors of `inner * scale + shift` after one more step of a chain."""
    if step.op == "negative" or (step.op == "subtract" and step.inputs[1] is value):
        scale = _combine("multiply", scale, g.const(-1.0))
        shift = None if shift is None else g.pointwise("negative", shift)
    if other is None or step.op == "negative":
        return scale, shift
    if step.op in ("multiply", "divide"):
        return _combine(step.op, scale, other), None if shift is None else g.pointwise(step.op, shift, other)
    if step.op == "subtract" and step.inputs[0] is value:
        return scale, g.pointwise("negative", other) if shift is None else g.pointwise("subtract", shift, other)
    return scale, other if shift is None else g.pointwise("add", shift, other)


def affine_chain(node: Node, varying: set[Node] | None = None) -> tuple[list[Node], Node]:
    """The steps with per-column or scalar operands above a value, the outermost first, and that value.

    `varying` are the nodes that differ from row to row, where they are known already.
    """
    varying = _varying_by_row([node]) if varying is None else varying
    chain: list[Node] = []
    while (inner := _affine_inner(node, varying)) is not None:
        chain.append(node)
        node = inner
    return chain, node


def _affine_inner(node: Node, varying: set[Node]) -> Node | None:
    """What a step of an affine chain scales or shifts."""
    if node.op not in ("add", "subtract", "multiply", "divide", "negative") or not dtypes.is_float(node.dtype):
        return None
    if node.shape[1] == 1:
        return None
    values = [i for i in node.inputs if i.shape == node.shape and i in varying]
    if len(values) != 1 or (node.op == "divide" and values[0] is not node.inputs[0]):
        return None
    others = [i for i in node.inputs if i is not values[0]]
    return values[0] if all(i.shape[0] == 1 and i not in varying for i in others) else None


def _varying_by_row(roots: Iterable[Node]) -> set[Node]:
    """The nodes that can differ from row to row: what depends on a matrix, not on vectors and numbers alone."""
    found: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        matrix = node.op == "matmul" or (node.op == "input" and node.attrs.get("ndim", 2) == 2)
        down = node.reduction and node.axis == 0
        if matrix or (not down and any(i in found for i in g.eager_inputs(node))):
            found.add(node)
    return found


# The order ----------------------------------------------------------------------------------------------------------


def _apply_to_all(graph: Graph, rule: Callable[[Node], Node], counts: dict[str, list[Node]] | None = None) -> Graph:
    def counted(node: Node) -> Node:
        result = rule(node)
        if result is not node and counts is not None:
            counts.setdefault(rule.__name__, []).append(node)
        return result

    return g.rewrite(graph, counted)


def _apply_where_matmul_dies(graph: Graph, notes: list[Note]) -> Graph:
    """Collapse sums of linear maps, one at a time, wherever nothing else needs the matrix product."""
    refused: set[Node] = set()
    while True:
        live = list(g.topological(graph.roots, g.eager_inputs))
        candidates = [n for n in live if n not in refused and n.op == "sum" and collapse_sum(n) is not n]
        if not candidates:
            return graph
        target = candidates[0]
        products = {n for n in g.topological([target], g.eager_inputs) if n.op == "matmul"}
        attempt = _substitute(graph, target, collapse_sum(target))
        survivors = set(g.topological(attempt.roots, g.eager_inputs))
        dead = [p for p in products if p not in survivors]
        if not dead:
            refused.add(target)
            continue
        graph = attempt
        for p in dead:
            rows, cols = p.shape
            inner = p.inputs[0].shape[1]
            notes.append(
                Note(
                    "the sum of a linear map is a matrix-vector product",
                    f"sum over {cols} columns of ({rows} x {inner}) @ ({inner} x {cols})",
                    f"{2 * rows * inner * cols - 2 * rows * inner:.3g} FLOPs",
                )
            )


def _pool_where_matmul_dies(graph: Graph, notes: list[Note]) -> Graph:
    """Pool the weights of linear maps of which nothing but the pooled values is needed."""
    for target in [n for n in g.topological(graph.roots) if _pooled(n) is not None]:
        value = pool_weights(target)
        if value is target:
            continue
        products = [n for n in g.topological([target]) if n.op == "matmul"]
        attempt = _substitute(graph, target, value)
        survivors = set(g.topological(attempt.roots))
        dead = [p for p in products if p not in survivors]
        if dead:
            graph = attempt
            width = _known_width(target)
            for p in dead:
                work = 2 * p.size * p.inputs[0].shape[1]
                what = (
                    f"means of {width} columns of ({p.shape[0]} x {p.inputs[0].shape[1]}) @ ({p.inputs[0].shape[1]} x "
                )
                notes.append(
                    Note(
                        "the average pool of a linear map pools the weights (infinite inputs may give inf for NaN)",
                        f"{what}{p.shape[1]})",
                        f"{work - work // width:.3g} FLOPs",
                    )
                )
    return graph


def _known_width(node: Node) -> int:
    pooled = _pooled(node)
    return pooled[1] if pooled is not None else 1


def _substitute(graph: Graph, target: Node, value: Node) -> Graph:
    """Exchange one node for another everywhere except beneath the new value itself."""
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = tuple(done[i] for i in node.inputs)
        changed = any(a is not b for a, b in zip(inputs, node.inputs, strict=True))
        done[node] = (
            value if node is target else Node(node.op, inputs, node.shape, node.dtype, node.attrs) if changed else node
        )
    return graph.replace(done)


def _fold_maximal(graph: Graph, notes: list[Note]) -> Graph:
    """Fold each affine chain once, at the last of its steps."""
    users = g.users(graph.roots)
    varying = _varying_by_row(graph.roots)
    chained = {n for n in users if _affine_inner(n, varying) is not None}
    inner = {n for n in chained if n not in graph.roots and users[n] and all(u in chained for u in users[n])}
    outermost = [n for n in users if n in chained and n not in inner]
    folds = {n: folded for n in outermost if (folded := fold_affine(n, varying)) is not n}
    for node in folds:
        steps = [n.op for n in reversed(affine_chain(node, varying)[0])]
        notes.append(
            Note("per-column multiply-adds are one", " -> ".join(steps), f"{(len(steps) - 2) * node.size:.3g} FLOPs")
        )
    # From the last to the first: a folded value may hold earlier folds beneath it.
    for node, folded in reversed(folds.items()):
        graph = _substitute(graph, node, folded)
    return graph


def simplify(graph: Graph) -> tuple[Graph, list[Note]]:
    """Apply every identity; returns the simplified graph and what was done to it."""
    counts: dict[str, list[Node]] = {}
    notes: list[Note] = []
    for rule in (drop_empty_casts, cancel_transposes, convert_matmul_operands):
        graph = _apply_to_all(graph, rule)
    graph = _pool_where_matmul_dies(share_common_subexpressions(graph), notes)
    graph = _apply_to_all(graph, reduction_over_one, counts)
    for node in counts.get("reduction_over_one", []):
        notes.append(
            Note(
                "a reduction along an axis of length 1 is the identity",
                f"{node.op} of {node.inputs[0].shape[0]} x {node.inputs[0].shape[1]} along axis {node.axis}",
                f"{2 * node.nbytes} bytes",
            )
        )
    for rule in (lower_mean, lower_logsumexp, recognize_expsum):
        graph = _apply_to_all(graph, rule)
    graph = share_common_subexpressions(graph)
    graph = _apply_where_matmul_dies(graph, notes)
    for rule in (reduction_over_one, push_transposes):
        graph = _apply_to_all(graph, rule)
    graph = _fold_maximal(share_common_subexpressions(graph), notes)
    return drop_needless_guards(share_common_subexpressions(graph)), notes
