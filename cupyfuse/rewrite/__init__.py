"""Algebraic rewrites of graphs: one function for each identity, one module for each family.

Each docstring states the identity, the values for which it is exact, and what it saves. Where the rewritten value could
differ for ±inf or NaN, the result is `guard(fast, exact)`: the rewritten value where that is finite, else the value as
written, evaluated on the device for those elements alone.
"""

from .activations import expand_power, recognize_activation
from .broadcasts import sink_broadcasts, transpose_products
from .cleanup import (
    cancel_transposes,
    convert_matmul_operands,
    drop_custom_derivatives,
    drop_guards_of_elements,
    drop_no_ops,
    drop_redundant_guards,
    push_transposes,
    share_common_subexpressions,
)
from .concats import repeat_columns, sink_concats
from .notes import Note
from .order import compute_pieces, replace_library_calls, simplify
from .order_statistics import sort_once
from .pools import pool_weights
from .reductions import drop_unit_reductions, lower_logsumexp, lower_mean, recognize_expsum
from .row_sums import choose_before_reductions, recognize_distances, recognize_entropy, sum_of_choices
from .scales import fold_scales
from .scans import scan_rows
from .sums import collapse_sum
from .variances import one_pass_variances, recognize_squared_distances, recognize_variance

__all__ = [
    "Note",
    "simplify",
    "replace_library_calls",
    "sort_once",
    "scan_rows",
    "one_pass_variances",
    # the identities
    "expand_power",
    "recognize_activation",
    "cancel_transposes",
    "collapse_sum",
    "convert_matmul_operands",
    "drop_no_ops",
    "drop_guards_of_elements",
    "drop_redundant_guards",
    "sink_broadcasts",
    "compute_pieces",
    "sink_concats",
    "repeat_columns",
    "drop_custom_derivatives",
    "fold_scales",
    "lower_logsumexp",
    "lower_mean",
    "pool_weights",
    "push_transposes",
    "recognize_expsum",
    "recognize_distances",
    "recognize_entropy",
    "recognize_variance",
    "recognize_squared_distances",
    "sum_of_choices",
    "choose_before_reductions",
    "drop_unit_reductions",
    "share_common_subexpressions",
    "transpose_products",
]
