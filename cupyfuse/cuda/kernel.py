"""Sources of kernels, and the structs of arguments that launches pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from .config import Config
from .parameters import Parameter


@dataclass(frozen=True)
class Kernel:
    """A translation unit with one kernel.

    Attributes
    ----------
    name, source : str
    parameters : tuple of Parameter
        The arrays and numbers that an emitted kernel takes.
    config : Config
    arch : str
        The architecture to compile for ("90a"); empty for the device's own.
    shared : int
        Bytes of dynamic shared memory.
    cluster : int
        Blocks of a cluster, as the source declares; a launch has a multiple of these.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    config: Config
    arch: str = ""
    shared: int = 0
    cluster: int = 1


# The last member of a conditional kernel's struct: points to a flag, which is 0 if the kernel has nothing to do.
CONDITION = "const u32* changed;"


def translation_unit(
    template: str,
    program: str,
    name: str,
    call: str,
    threads: int,
    blocks: int = 1,
    conditional: bool = False,
    cluster: int = 1,
    by_address: bool = False,
    follows: bool = False,
) -> str:
    """Write the source of a kernel: the template, the struct `Program` that a launch passes as `p`, and the entry.

    Parameters
    ----------
    template : str
        Name of the file in `kernels_cu/`, without ".cu".
    program, name, call : str
        Declaration of the struct; name of the entry; its body.
    threads, blocks : int
        Threads per block; least blocks per multiprocessor.
    conditional : bool
        Return at once where `*p.changed` is 0; the struct ends with `CONDITION`.
    cluster : int
        Blocks of a cluster.
    by_address : bool
        The struct is read where the launch put it, not in copies: the TMA reads tensor maps there, and functions that
        are not inlined take its address.
    follows : bool
        The template itself calls `follow_earlier_launches`, after work that touches no global memory.
    """
    attributes = f"__launch_bounds__({threads}, {blocks})" + f" __cluster_dims__({cluster}, 1, 1)" * (cluster > 1)
    parameter = f"const {'__grid_constant__ ' * by_address}Program p"
    condition = ["    if (*p.changed == 0) {", "        return;", "    }"]
    return "\n".join(
        [
            '#include "launch_order.cuh"',
            f'#include "{template}.cu"',
            "",
            program,
            "",
            f'extern "C" __global__ void {attributes} {name}({parameter}) {{',
            *([] if follows else ["    follow_earlier_launches();"]),
            *(condition if conditional else []),
            f"    {call};",
            "}",
            "",
        ]
    )


@lru_cache(maxsize=64)
def header(name: str) -> str:
    """Return the text of a file in `kernels_cu/`: inside the installed package, or beside it in a checkout."""
    inside = resources.files("cupyfuse") / "kernels_cu" / name
    beside = Path(__file__).resolve().parents[2] / "kernels_cu" / name
    return inside.read_text() if inside.is_file() else beside.read_text()


def inlined(source: str) -> str:
    """Replace the first `#include` of each of our headers by its text and drop others, for compilers and caches."""
    seen: set[str] = set()

    def include(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        text = header(name).replace("#pragma once\n", "")
        return _INCLUDE.sub(include, text)

    return _INCLUDE.sub(include, source)


_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
