"""The table of PyTorch's operations: what each of them computes on traced values.

`find` resolves a call, by whatever overload, to its `Rule` and canonical arguments. From the bottom to the top:
`promotion` (of dtypes), `values` and `axes` (traced tensors of any rank), `table` (rules, and the callables that stand
for them), `overloads` (resolving calls), then the rules: `pointwise`, `logic`, `activations`, `casts`, `reductions`,
`normalization`, `linear`, `parts`, `pairs`, `shapes`, `labels`, `losses`. `random` says which calls draw random
numbers.
"""

from . import activations as activations
from . import casts as casts
from . import labels as labels
from . import linear as linear
from . import logic as logic
from . import losses as losses
from . import normalization as normalization
from . import pairs as pairs
from . import parts as parts
from . import pointwise as pointwise
from . import reductions as reductions
from . import shapes as shapes
from .overloads import find
from .parts import PARTS, moves_parts, takes_part
from .random import NUMPY_FUNCTIONS, PLACING, draws
from .table import RULES, Found, Refused, Rule

__all__ = [
    "NUMPY_FUNCTIONS",
    "PARTS",
    "PLACING",
    "RULES",
    "Found",
    "Refused",
    "Rule",
    "draws",
    "find",
    "moves_parts",
    "takes_part",
]
