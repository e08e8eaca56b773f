"""The options of fused modules, and the precision that PyTorch is set to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...settings import DEFAULT_WORKSPACE


@dataclass(frozen=True)
class Options:
    """Options of a fused module.

    Attributes
    ----------
    precision : str or None
        Of float32 products; None follows `torch.get_float32_matmul_precision`.
    max_workspace : int
        Bytes of workspace a call may take; larger chains run in blocks of rows where they can.
    keep_halves : bool
        Whether the fp16 hi/lo split of weights is cached.
    frozen : bool
        The caller's promise that weights never change without a new version: prepacked weights are cached without
        checks, on the CPU too.
    only_gains : bool
        Whether chains that the cost model expects to lose are left to PyTorch.
    max_prepared : int or None
        Bytes of prepacked weights that may be cached; None for a share of the free memory.
    """

    precision: str | None = None
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    frozen: bool = False
    only_gains: bool = True
    max_prepared: int | None = None

    def current_precision(self) -> str:
        return self.precision or matmul_precision()


_backend_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # of newer versions


def matmul_precision() -> str:
    """Return PyTorch's precision of float32 products.

    It is set by `set_float32_matmul_precision`, or by the newer switches for each backend.
    """
    switch = _backend_precision("cuda", "matmul") if _backend_precision is not None else "none"
    if switch == "ieee":
        return "highest"
    try:
        precision = str(torch._C._get_float32_matmul_precision())
    except RuntimeError:  # both were used
        precision = "highest"
    return "high" if switch == "tf32" and precision == "highest" else precision
