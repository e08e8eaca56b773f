"""16-bit products stored rounded, with their bias, where that takes less time and as the code as written rounds them.

Otherwise what a row program reads of a product is stored in float32, at twice the bytes. Whether rounding makes results
no less accurate than as written is for `plan/rounding.py` to say; here it is whether the bytes are worth it.
"""

from __future__ import annotations

from collections.abc import Collection

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ..rounding import bias_added
from .steps import Step, step_of

# Bytes of a float32 product that stay in the L2 cache until they are read: fewer bytes would not save time there.
_HELD = 32 << 20
WORTH = 0.95  # of the time without, what a plan with a rounded product may take: accuracy is the price
STORED_ROUNDED = "stored in {}: the code as written rounds it, too"


def rounded_value(product: Node, tail: Step, results: Collection[Node], storage: dict[Node, str]) -> Node | None:
    """Return the product or its sum with a bias, if a row program may read it rounded; None if not.

    `results` are values that are read after the last step. A sum that is one, stored in 16 bits for a backward pass, is
    written so anyway.
    """
    if not product.rounds or tail.repair_inputs or any(n.op == "guard" for n in tail.nodes):
        return None
    value = bias_added(product, [n for n in tail.nodes if product in n.inputs]) or product
    if value is not product and value in results and storage[value] == value.dtype:
        return None if product in results or tail.outputs == (value,) else value
    if product.size * dtypes.ITEMSIZE["float32"] <= _HELD:
        return None
    kept = {*results, *tail.outputs}  # for others, who may need it as it is
    return None if product in kept or value in kept else value


def cut_behind(value: Node, tail: Step, product: Node) -> tuple[Step, Step]:
    """Cut a row program in two: one that computes a value from the product and a bias, and one that reads the value.

    What both need beside it, such as the bias cast to the product's dtype, both compute. If the value is the product
    itself, the first one computes nothing.
    """
    stored = {product, *tail.inputs}
    reached = set(g.topological([value], lambda n: () if n in stored else g.eager_inputs(n))) | {product}
    first = [n for n in tail.nodes if n in reached]
    outputs = [n for n in tail.outputs if n is not value]
    reread = set(g.topological(outputs, lambda n: () if n is value else g.eager_inputs(n)))
    rest = [n for n in tail.nodes if n in reread and n is not value]
    results = [value] if first else []
    return (
        step_of("RowProgram", tail.domain, first, [i for i in tail.inputs if i in reached], results, []),
        step_of("RowProgram", tail.domain, rest, [value, *(i for i in tail.inputs if i in reread)], outputs, []),
    )
