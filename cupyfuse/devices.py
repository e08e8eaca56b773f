"""What GPUs can do at best, by their vendors' datasheets: the floor that plans quote."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak rates of one GPU: memory bandwidth in bytes/s, arithmetic in FLOP/s (dense, no sparsity).

    `simt` are the float32 units, `simt64` the float64 units, `tf32` and `half` the tensor cores; `processors` are its
    multiprocessors. `split` is the rate measured for large products of hi/lo splits, all three products counted; 0
    where this library has no kernel for them.
    """

    name: str
    bandwidth: float
    simt: float
    simt64: float
    tf32: float
    half: float
    processors: int
    split: float = 0.0


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("H200", 4.8e12, 67e12, 34e12, 494e12, 989e12, 132, 900e12),
        Device("H100", 3.35e12, 67e12, 34e12, 494e12, 989e12, 132, 900e12),
        Device("A100", 2.04e12, 19.5e12, 9.7e12, 156e12, 312e12, 108),
        Device("L40S", 0.864e12, 91.6e12, 1.43e12, 183e12, 362e12, 142),
        Device("RTX 4090", 1.008e12, 82.6e12, 1.29e12, 82.6e12, 165e12, 128),
        Device("T4", 0.32e12, 8.1e12, 0.25e12, 8.1e12, 65e12, 40),
    )
}
DEFAULT = "H200"


def find(name: str) -> Device:
    """The device whose name occurs in `name`, as the driver reports it ('NVIDIA H200').

    Raises
    ------
    ValueError
        No device of the table is named there.
    """
    for key, device in DEVICES.items():
        if _mentions(key, name):
            return device
    raise ValueError(f"gpu: expected one of {', '.join(DEVICES)}, got {name!r}")


def is_known(name: str) -> bool:
    """Whether `find` would find a device."""
    return any(_mentions(key, name) for key in DEVICES)


def _mentions(key: str, name: str) -> bool:
    """Whether a device's name stands as words of its own: an RTX A1000 is no A100."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(key)}(?![0-9])", name, re.IGNORECASE) is not None
