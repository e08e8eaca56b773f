"""The algebra: one function for each identity, one module for each family of them.

A rewrite is a promise. Each docstring states the identity, for which values it is exact, and what it saves. Where a
rewritten value could differ from the written one for ±inf or NaN, the result is wrapped in `guard(fast, exact)`: the
rewritten value where it is finite, otherwise the value as written, evaluated on the device for just those elements.
`order` says when each is tried.
"""

from .affine import fold_affine
from .cleanup import (
    cancel_transposes,
    convert_matmul_operands,
    drop_no_ops,
    drop_slopes,
    push_transposes,
    share_common_subexpressions,
)
from .guards import drop_needless_guards
from .notes import Note
from .order import simplify
from .pools import pool_weights
from .reductions import lower_logsumexp, lower_mean, recognize_expsum, reduction_over_one
from .repeats import drop_repeats, turn_products
from .sums import collapse_sum

__all__ = [
    "Note",
    "simplify",
    # the identities
    "cancel_transposes",
    "collapse_sum",
    "convert_matmul_operands",
    "drop_no_ops",
    "drop_needless_guards",
    "drop_repeats",
    "drop_slopes",
    "fold_affine",
    "lower_logsumexp",
    "lower_mean",
    "pool_weights",
    "push_transposes",
    "recognize_expsum",
    "reduction_over_one",
    "share_common_subexpressions",
    "turn_products",
]
