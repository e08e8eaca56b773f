"""Choice of the values that a forward pass saves for its backward pass, and extraction of the two graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.kinds import is_product, squared
from ..ir.operators import COMPARISONS
from ..ir.products import strip_transposes, sum_with_row
from ..ir.rebuild import expression_key
from .quotients import is_share

_LONG_ROW, _MANY_ELEMENTS = 256, 1 << 20  # elements of a row of which a value is saved, and of all rows


def saved_values(
    forward: Sequence[Node], gradients: Sequence[Node], products: bool = True, with_biases: bool = True
) -> list[Node]:
    """Choose the values that the forward pass saves for the backward pass; all others are recomputed.

    Saved are the matrix products that gradients need, and column reductions of several rows. Of 16-bit values these are
    saved for what is saved alone: others would belong to values that the forward pass may have rounded, and that the
    backward pass computes unrounded. If gradients need products only for reductions along their rows, these are saved
    instead, and rewriting may eliminate the product; but not where 16-bit values beneath them are saved, and rounded.
    Elements that are compared with their maximum or minimum are saved, since recomputed ones may be rounded differently
    and miss it.

    Parameters
    ----------
    forward, gradients : sequence of Node
        The roots of the two passes, in one graph.
    products : bool
        Whether products may be saved; else their reductions are, and the backward pass computes products.
    with_biases : bool
        Whether 16-bit products that are read for their sum with a bias alone are saved as that. It is rounded as the
        code as written rounds it, and not by the size of a product that the bias cancels.
    """
    computed = dict.fromkeys(g.topological(forward))
    found = _compared_extremes(computed, gradients)
    compared = [n for n in computed if n in found]  # in topological order
    biased = sums_with_biases(forward) if products and with_biases else {}
    # The forward pass reads sums with biases unrounded: exponentials, and what these are relative to, have to be of
    # what is saved.
    sums = set(biased.values())
    of_sums = _reached_by(computed, sums)
    computed_again = {n for n in of_sums if n.op in _EXTREMES} | _reached_by(computed, of_sums, _EXPONENTIALS)
    column_reductions: set[Node] = set()
    kept: set[Node] = set()

    def saved(node: Node) -> bool:
        """Whether to save a value where gradients need it, reductions of products along rows aside."""
        product = counts_as_product(node) and (products or node in forward)
        return node in computed and (product or node in column_reductions or node in kept)

    def counts_as_product(node: Node) -> bool:
        """Whether a value is a product, or the sum with a bias that is saved in the place of one."""
        return node in sums or (node.op == "matmul" and node not in biased)

    exact: set[Node] = set()  # what the backward pass computes again from what is saved, bit for bit
    for node in computed:
        if node.reduction and node.axis == 0 and node.inputs[0].shape[0] > 1:
            # Of other values of 16 bits, the forward pass may store rounded ones. Without products all are recomputed.
            belongs = node.inputs[0] in exact or not _has_16_bits(node) or not products
            if belongs and node not in compared and node not in computed_again:
                column_reductions.add(node)
        if saved(node) or (_is_exact(node) and exact.issuperset(node.inputs)):
            exact.add(node)

    for extremum in compared:
        kept.update(_inputs_to_save([extremum.inputs[0]], saved))

    needs_product: set[Node] = set()
    for node in computed:
        if counts_as_product(node) or any(i in needs_product for i in node.inputs):
            needs_product.add(node)

    def row_reduction(node: Node) -> bool:
        """Whether a value is a reduction of products along their rows, which may be saved instead of these."""
        return node in needs_product and node.reduction and node.axis == 1 and node not in compared

    needed = _reachable(gradients, lambda n: saved(n) or row_reduction(n))
    read = {n for n in needed if counts_as_product(n) or (n in kept and _has_16_bits(n))}

    @cache
    def instead_of_product(reduction: Node) -> bool:
        """Whether to save a row reduction, since gradients need what is saved beneath it for nothing else."""
        return not products or read.isdisjoint(_reachable([reduction.inputs[0]], saved))

    def chosen(node: Node) -> bool:
        return instead_of_product(node) if row_reduction(node) else saved(node)

    return [n for n in _reachable(gradients, chosen) if chosen(n)]


def sums_with_biases(forward: Sequence[Node]) -> dict[Node, Node]:
    """Find the 16-bit products that the forward pass reads for their sums with a bias alone: these by product."""
    found: dict[Node, Node] = {}
    for node, readers in g.users(forward).items():
        if node.op == "matmul" and _has_16_bits(node) and node not in forward:
            value = sum_with_row(node, readers)
            if value is not None:
                found[node] = value
    return found


def operands_to_save(forward: Sequence[Node], gradients: Sequence[Node], saved: Collection[Node]) -> list[Node]:
    """List the computed 16-bit operands of the forward pass's products that products of the backward pass read, too.

    The forward pass rounds and stores each for its own product, unless rewriting eliminates that product.

    Parameters
    ----------
    forward, gradients : sequence of Node
        The roots of the two passes, in one graph.
    saved : collection of Node
        The values that are saved anyway.
    """
    products = [n for n in g.topological(forward) if n.op == "matmul"]
    operands = {strip_transposes(i)[0] for n in products for i in n.inputs}
    reading = [n for n in _reachable(gradients, lambda n: n in saved) if n.op == "matmul" and n not in saved]
    read = dict.fromkeys(strip_transposes(i)[0] for n in reading for i in n.inputs)
    # Reductions are saved in float32 (`stored`).
    found = [n for n in read if n in operands and n not in saved and _has_16_bits(n) and not n.reduction]
    return [n for n in found if _is_computed(n, saved)]


def values_of_rows(forward: Sequence[Node], gradients: Sequence[Node], saved: Collection[Node]) -> list[Node]:
    """List the values of whole rows that gradients read, such as the mean and the deviation of a norm.

    One number for each long row, of many, costs little to save; to compute it again, the backward pass would wait for
    reductions, one after the other. Of exponentials and of what is relative to an extremum kernels make better use
    where they compute both. Saved are those alone that the backward pass would compute alike: one that reads rounded
    16-bit elements needs their mean, not that of unrounded ones.

    Parameters
    ----------
    forward, gradients : sequence of Node
        The roots of the two passes, in one graph.
    saved : collection of Node
        The values that are saved anyway.
    """
    alike: set[Node] = set()  # what both passes compute alike
    nearly: set[Node] = set()  # and what differs by roundings of a few of its own digits
    length: dict[Node, int] = {}  # of the rows that a value of rows has been reduced from
    for node in g.topological(forward):
        if node.op in _EXTREMES or node.op in _EXPONENTIALS or is_product(node):
            continue
        operands = [i for i in node.inputs if i.op != "const"]
        reduces_rows = node.reduction and node.axis == 1
        rounds = _has_16_bits(node) and not (_is_exact(node) or _stays_wide(node))
        of_alike = all(i in alike for i in operands)
        # Of squares, nothing cancels in the sum: it differs by as few digits.
        of_squares = reduces_rows and node.op in ("sum", "mean") and squared(node.inputs[0]) in nearly
        if of_squares or (of_alike and not rounds):
            alike.add(node)
            length[node] = max([node.inputs[0].shape[1] if reduces_rows else 0, *(length.get(i, 0) for i in operands)])
        if node in alike or (node.op == "subtract" and of_alike):
            nearly.add(node)

    def chosen(node: Node) -> bool:
        rows, long = node.shape[0], length.get(node, 0)
        return node.shape[1] == 1 and long >= _LONG_ROW and rows * long >= _MANY_ELEMENTS and node not in saved

    found = [n for n in _reachable(gradients, lambda n: n in saved or chosen(n)) if chosen(n)]
    return list({expression_key(n): n for n in reversed(found)}.values())


def with_results(forward: Sequence[Node], gradients: Sequence[Node], saved: Collection[Node]) -> list[Node]:
    """Save the 16-bit values with limits, as of sigmoid, that results show as they are, where gradients read them.

    What follows a result may divide by its distance from a limit, as a loss of a probability does by 1 - y; the
    gradient of y, which multiplies by that distance, has to read the same rounded y, as in eager: where y is rounded to
    1, that of an unrounded one would be the largest of all, not 0.

    Parameters
    ----------
    forward, gradients : sequence of Node
        The roots of the two passes, in one graph.
    saved : collection of Node
        The values that are saved anyway; those that gradients read for such results alone are left out.
    """

    def ends(node: Node) -> bool:
        return not _has_16_bits(node) or _has_limits(node) or not _is_exact(node)

    shown = [n for n in _reachable(forward, ends) if _has_limits(n) and _has_16_bits(n)]
    everything = {*saved, *shown}
    read = set(_reachable(gradients, lambda n: n in everything))
    return [n for n in dict.fromkeys([*saved, *shown]) if n in read]


def read_operands(gradients: Sequence[Node], operands: Mapping[Node, Node], saved: Collection[Node]) -> list[Node]:
    """Have products of the backward pass read `operands[n]` in the place of n; all else computes n again.

    That would lose digits by n's rounding, as the gradient of n itself would. Nodes in `saved` stay.
    """
    done: dict[Node, Node] = {}

    def rounded(node: Node) -> Node:
        if node.op == "transpose" and strip_transposes(node)[0] in operands:
            return g.transpose(rounded(node.inputs[0]))
        return operands.get(node, done[node])

    for node in _reachable(gradients, lambda n: n in saved):
        if node in saved:
            done[node] = node
        else:
            read = rounded if node.op == "matmul" else done.__getitem__
            done[node] = g.with_inputs(node, [read(i) for i in node.inputs])
    return [done[n] for n in gradients]


def _is_computed(node: Node, saved: Collection[Node]) -> bool:
    """Whether a value is more than a view or a broadcast of an input or of what is saved."""
    while node.op in (*g.VIEWS, "broadcast", "stop_gradient"):
        node = node.inputs[0]
    return node.op not in ("input", "const") and node not in saved


def _has_16_bits(node: Node) -> bool:
    """Whether a value is rounded where it is stored: it is computed in a wider dtype."""
    return dtypes.compute_dtype(node.dtype) != node.dtype


def _reached_by(computed: Iterable[Node], roots: Iterable[Node], operators: Collection[str] | None = None) -> set[Node]:
    """Find what depends on roots, or is one; with `operators`, on roots with one of these. `computed` is in order."""
    found = {n for n in roots if operators is None or n.op in operators}
    for node in computed:
        if any(i in found for i in node.inputs):
            found.add(node)
    return found


def _compared_extremes(computed: Collection[Node], gradients: Sequence[Node]) -> set[Node]:
    """Find the maxima and minima of the forward pass that gradients compare with the elements they were taken of."""

    def is_not_recomputed(node: Node) -> bool:
        return node in computed and (node.op == "matmul" or (node.reduction and node.op not in _EXTREMES))

    pairs = [n.inputs for n in _reachable(gradients, is_not_recomputed) if n.op == "equal"]
    return {b for a, b in pairs if b in computed and b.op in _EXTREMES and b.inputs[0] is a}


_EXTREMES = ("max", "min")
_EXPONENTIALS = ("exp", "exp2", "expm1", "expsum", "expdistances")
_WITH_LIMITS = ("sigmoid", "tanh")
# Operators that do not round.
_EXACT_OPS = {
    *("broadcast", "stop_gradient", "custom_derivative", "transpose", "reshape"),
    *("where", "isnan", "negative", "absolute", "relu"),
    *(*_EXTREMES, "maximum", "minimum", "clip", "logical_and", "logical_or", "logical_not"),
    *COMPARISONS.values(),
}


def _has_limits(node: Node) -> bool:
    """Whether the derivative of a value is computed from its distance from the limits that it tends to."""
    return node.op in _WITH_LIMITS or is_share(node)


def _is_exact(node: Node) -> bool:
    """Whether recomputing a node from the same inputs, in another kernel, gives the same bits."""
    if node.op == "cast":
        source = node.inputs[0]
        return source.op == "const" or dtypes.promote(source.dtype, node.dtype) == node.dtype
    return node.op in _EXACT_OPS or not node.inputs


def _inputs_to_save(roots: list[Node], saved: Callable[[Node], bool]) -> list[Node]:
    """Choose the fewest elements to save from which the roots can be recomputed bit for bit."""

    def is_rounded(node: Node) -> bool:
        """Whether recomputing a node from what is saved could round it differently."""
        return not saved(node) and not _is_exact(node)

    found = [n for n in _reachable(roots, lambda n: saved(n) or is_rounded(n)) if is_rounded(n)]
    return found if sum(n.size for n in found) <= sum(n.size for n in roots) else roots


def stored(node: Node) -> Node:
    """Return the node to save for a value: 16-bit reductions, and values of rows, in float32, as they are computed."""
    return g.cast(node, dtypes.compute_dtype(node.dtype)) if _stays_wide(node) else node


def _stays_wide(node: Node) -> bool:
    """Whether a value is not rounded to its 16 bits where it is computed: it is smaller than the rows of its step.

    Values with limits are saved as results have them (`with_results`).
    """
    is_small = node.pointwise and node.shape[1] == 1 < node.shape[0]
    return node.reduction or (is_small and not _has_limits(node))


def _is_stored(node: Node) -> bool:
    """Whether a node is the `stored` form of a reduction, or of a value of rows."""
    if node.op != "cast" or not _stays_wide(node.inputs[0]):
        return False
    return expression_key(node) == expression_key(stored(node.inputs[0]))


def _reachable(roots: Iterable[Node], stop: Callable[[Node], bool]) -> list[Node]:
    """List the nodes beneath some roots in topological order, without the inputs of nodes that stop the search."""
    return list(g.topological(roots, lambda n: () if stop(n) else n.inputs))


def extract_graph(outputs: Sequence[Node], leaves: Sequence[tuple[Node, str]]) -> Graph:
    """Extract the part of a graph between leaves and outputs, with the leaves as its inputs.

    Parameters
    ----------
    outputs : sequence of Node
    leaves : sequence of (Node, str)
        The inputs in order, with their names; unused ones are kept. The `stored` form of a node also stands for the
        node itself, and one of a reduction, or of values of rows, for others that are computed from the same.
    """
    inputs: list[Node] = []
    done: dict[Node, Node] = {}
    for number, (node, name) in enumerate(leaves):
        leaf = g.argument(number, name, node.shape, node.dtype, node.ndim)
        inputs.append(leaf)
        done.setdefault(node, leaf)
        if _is_stored(node):
            done.setdefault(node.inputs[0], leaf)
    same = {expression_key(node): leaf for node, leaf in done.items() if _stays_wide(node)}
    for node in g.topological(outputs, lambda n: () if n in done else n.inputs):
        if node not in done:
            twin = same.get(expression_key(node)) if _stays_wide(node) else None
            done[node] = twin or g.with_inputs(node, [done[i] for i in node.inputs])
    return Graph(inputs, [done[n] for n in outputs])
