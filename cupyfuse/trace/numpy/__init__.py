"""NumPy's functions and ufuncs on traced arrays.

`dispatch` looks a function up: native forms (`functions`, `reductions`, `products`), which fuse; library steps
(`steps`); or an error that says why neither serves. `ufuncs` does the same for ufuncs and their methods; `conversions`
stands in for `np.asarray` and its like, which NumPy offers no protocol for, while a function is traced.
"""

from .conversions import traced_conversions
from .dispatch import FUNCTIONS, call_function, call_method
from .ufuncs import call_ufunc

__all__ = ["FUNCTIONS", "call_function", "call_method", "call_ufunc", "traced_conversions"]
