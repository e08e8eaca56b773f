"""Arrays of other libraries: DLPack arrays go in without a copy, and results are arrays of the same library.

`Tensor` below has all that a library needs. PyTorch's tensors follow, if torch is installed.

    python examples/dlpack.py
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from common import array_module

import cupyfuse as cf


class Tensor:
    """An array of another library, around the memory of a NumPy or CuPy array."""

    def __init__(self, data: Any):
        self._data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._data.__dlpack_device__()

    # Results are converted by the namespace's from_dlpack.
    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return types.SimpleNamespace(from_dlpack=lambda array: Tensor(array_module().from_dlpack(array)))

    def tolist(self) -> Any:
        return self._data.tolist()


@cf.fuse
def probabilities(x, weight):
    return cf.softmax(x @ weight.T, axis=1)


def main() -> None:
    xp = array_module()
    x = xp.arange(6, dtype="float32").reshape(2, 3)
    weight = xp.ones((2, 3), "float32")

    out = probabilities(Tensor(x), Tensor(weight))
    print(type(out).__name__, out.tolist())
    if not isinstance(out, Tensor) or not np.allclose(out.tolist(), 0.5):
        raise SystemExit("expected a Tensor of probabilities 0.5")

    try:
        import torch
    except ImportError:
        print("PyTorch is not installed; its tensors work the same way")
        return
    device = "cuda" if xp is not np and torch.cuda.is_available() else "cpu"
    out = probabilities(torch.zeros((2, 3), device=device), torch.ones((2, 3), device=device))
    print(type(out).__name__, out.tolist())
    if not isinstance(out, torch.Tensor) or not torch.allclose(out, torch.full_like(out, 0.5)):
        raise SystemExit("expected a torch.Tensor of probabilities 0.5")


if __name__ == "__main__":
    main()
