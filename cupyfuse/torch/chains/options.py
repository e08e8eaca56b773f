"""The options of fused modules, and the precision that PyTorch is set to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...devices import Device
from ...settings import DEFAULT_WORKSPACE, Settings, check_flag, check_precision, check_prepared, check_workspace


@dataclass(frozen=True)
class Options:
    """Options of a fused module, as the parameters of `cupyfuse.torch.fuse`."""

    precision: str | None = None
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    frozen: bool = False
    only_gains: bool = True
    max_prepared: int | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            check_precision(self.precision)
        check_workspace(self.max_workspace)
        check_prepared(self.max_prepared)
        for name in ("keep_halves", "frozen", "only_gains"):
            check_flag(name, getattr(self, name))

    def current_precision(self) -> str:
        """Return the precision of float32 products: that of the options, else PyTorch's at the moment."""
        return self.precision or matmul_precision()

    def settings_on(self, device: Device | None) -> Settings:
        """Return the settings of plans for a device."""
        return Settings(self.current_precision(), device, self.max_workspace, self.keep_halves)


def matmul_precision() -> str:
    """Return PyTorch's precision of float32 products.

    It is set by `set_float32_matmul_precision`, or by the switches of each backend.
    """
    switch = torch._C._get_fp32_precision_getter("cuda", "matmul")
    if switch == "ieee":
        return "highest"
    try:
        precision = str(torch._C._get_float32_matmul_precision())
    except RuntimeError:  # both were used
        precision = "highest"
    return "high" if switch == "tf32" and precision == "highest" else precision
