"""NumPy's functions and ufuncs on traced arrays.

`dispatch` looks a function up: native forms (`functions`, `reductions`, `products`, `writing`, `callbacks`), which
fuse; library steps (`steps`); or an error that says why neither serves. `ufuncs` does the same for ufuncs and their
methods. `conversions` stands in for functions that offer traced arrays no protocol, while a function is traced:
`np.asarray` and its like, those that make arrays (`creation`), and SciPy's compiled ones (`scipy`).
"""

from .choices import BUILTINS
from .conversions import replacement_of, traced_conversions
from .dispatch import FUNCTIONS, call_function, call_method
from .scipy import is_distribution
from .ufuncs import call_ufunc

__all__ = [
    "BUILTINS",
    "FUNCTIONS",
    "call_function",
    "call_method",
    "call_ufunc",
    "is_distribution",
    "replacement_of",
    "traced_conversions",
]
