"""The table of PyTorch's operations: what each of them means on traced values.

`find` takes an operation as PyTorch's records have it, in any of its spellings, and gives the `Rule` and its canonical
arguments. From the bottom to the top: `table` (what a rule is), `overload` (what rules are called, and with what
arguments), `meaning` (promotion, operators on values of any rank), then the rules: `pointwise`, `logic`, `casts`,
`activations`, `reductions`, `normalization`, `linear`, `shapes`, `labels`, `losses`. `random` says which calls
draw random numbers.
"""

from . import activations as activations
from . import casts as casts
from . import labels as labels
from . import linear as linear
from . import logic as logic
from . import losses as losses
from . import normalization as normalization
from . import pointwise as pointwise
from . import reductions as reductions
from . import shapes as shapes
from .overloads import find, inplace_result
from .random import draws
from .table import RULES, Found, Refused, Rule

__all__ = ["RULES", "Found", "Refused", "Rule", "draws", "find", "inplace_result"]
