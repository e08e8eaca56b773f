"""The door for PyTorch: modules and functions whose chains of operations run fused.

>>> import cupyfuse.torch
>>> model = cupyfuse.torch.fuse(model)                     # the same parameters, names, hooks, gradients
>>> print(model.explain())                                 # what was fused, and why the rest was not
>>> compiled = torch.compile(model, backend="cupyfuse")    # the same in graphs of `torch.compile`
"""

from .explain import Explanation, Part, explain
from .module import fuse, refresh

__all__ = ["Explanation", "Part", "explain", "fuse", "refresh"]
