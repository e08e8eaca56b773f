"""NumPy's functions and ufuncs on traced arrays.

`dispatch` looks a function up: a native form (`functions`, `reductions`, `products`, `writing`, `callbacks`), which
fuses; a library step (`steps`); or an error that says why there is neither. `ufuncs` does the same for ufuncs and their
methods. While a function is traced, `conversions` replaces functions that dispatch to no protocol: `np.asarray` and its
like, all functions and ufuncs of lists (`lists`), `choices` among Python's and NumPy's own, creation functions
(`creation`), SciPy's compiled ones (`scipy`), those of Python's `math` (`mathematics`), and NumPy's types of numbers
where code calls them (`scalar_types`).
"""

from .choices import REPLACED_BUILTINS, REPLACED_TYPES
from .conversions import replacement_of, traced_conversions
from .dispatch import FUNCTIONS, call_function, call_method
from .scalar_types import REPLACED_SCALAR_TYPES, SCALAR_CONVERTERS, SCALAR_TYPES
from .scipy import is_distribution, is_multimethod
from .ufuncs import call_ufunc

__all__ = [
    "FUNCTIONS",
    "REPLACED_BUILTINS",
    "REPLACED_SCALAR_TYPES",
    "REPLACED_TYPES",
    "SCALAR_CONVERTERS",
    "SCALAR_TYPES",
    "call_function",
    "call_method",
    "call_ufunc",
    "is_distribution",
    "is_multimethod",
    "replacement_of",
    "traced_conversions",
]
