"""Peak rates of GPUs, from vendors' datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak rates of one GPU.

    Attributes
    ----------
    name : str
    bandwidth : of memory, bytes/s
    simt, simt64 : of float32 and float64 arithmetic, FLOP/s
    tf32, half : of tensor cores without sparsity, FLOP/s
    processors : number of multiprocessors
    split : measured with large hi/lo split products, counting all three products, FLOP/s; 0 without a kernel for them
    own_half : measured within large tiles of 16-bit products by our own kernel, FLOP/s; 0 where not measured
    """

    name: str
    bandwidth: float
    simt: float
    simt64: float
    tf32: float
    half: float
    processors: int
    split: float = 0.0
    own_half: float = 0.0

    @property
    def with_article(self) -> str:
        """The name in a sentence: an H100, a T4."""
        return f"{'a' if self.name.startswith('T') else 'an'} {self.name}"

    @property
    def has_warpgroups(self) -> bool:
        """Whether the GPU has Hopper's warpgroup instructions, for which our own GEMM kernels are written."""
        return self.split > 0


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("H200", 4.8e12, 67e12, 34e12, 494e12, 989e12, 132, 900e12, 826e12),
        Device("H100", 3.35e12, 67e12, 34e12, 494e12, 989e12, 132, 900e12, 826e12),
        Device("A100", 2.04e12, 19.5e12, 9.7e12, 156e12, 312e12, 108),
        Device("L40S", 0.864e12, 91.6e12, 1.43e12, 183e12, 362e12, 142),
        Device("RTX 4090", 1.008e12, 82.6e12, 1.29e12, 82.6e12, 165e12, 128),
        Device("T4", 0.32e12, 8.1e12, 0.25e12, 8.1e12, 65e12, 40),
    )
}
DEFAULT = "H200"


def find(name: str) -> Device:
    """Look a device up by the name that the driver reports, such as 'NVIDIA H200'.

    Raises
    ------
    ValueError
        The device is not in the table.
    """
    for key, device in DEVICES.items():
        if isinstance(name, str) and _mentions(key, name):
            return device
    raise ValueError(f"gpu: expected one of {', '.join(DEVICES)}, got {name!r}")


def is_known(name: str) -> bool:
    """Whether a device of this name is in the table."""
    return any(_mentions(key, name) for key in DEVICES)


def _mentions(key: str, name: str) -> bool:
    """Whether a reported name contains `key` as whole words: an RTX A1000 is not an A100."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(key)}(?![0-9])", name, re.IGNORECASE) is not None
