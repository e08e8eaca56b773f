"""Kernels as text: what the compiler gets, and what a launch passes."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from .configure import Config
from .program import Parameter


@dataclass(frozen=True)
class Kernel:
    """A translation unit, the name of its entry, and what to pass to it.

    Attributes
    ----------
    name, source : str
    parameters : tuple of Parameter
        The arrays and numbers that an emitted kernel is given.
    config : Config
    arch : str
        The architecture that it has to be compiled for ("90a"); empty for that of the device.
    shared : int
        Bytes of dynamic shared memory.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    config: Config
    arch: str = ""
    shared: int = 0


# The last member of a conditional kernel's struct: where it is 0, the kernel writes nothing.
CONDITION = "const u32* changed;"


def translation_unit(
    template: str, program: str, name: str, call: str, threads: int, blocks: int = 1, conditional: bool = False
) -> str:
    """The source of a kernel: a template, the struct `Program` that the launch passes as `p`, and the entry.

    Parameters
    ----------
    template : str
        Name of the file in `kernels_cu/`, without ".cu".
    program, name, call : str
        What declares the struct; the entry's name; what it does.
    threads, blocks : int
        Of a block; on a multiprocessor.
    conditional : bool
        Return at once where `*p.changed` is 0; the struct ends with `CONDITION`.
    """
    condition = ["    if (*p.changed == 0) {", "        return;", "    }"]
    return "\n".join(
        [
            f'#include "{template}.cu"',
            "",
            program,
            "",
            f'extern "C" __global__ void __launch_bounds__({threads}, {blocks}) {name}(const Program p) {{',
            *(condition if conditional else []),
            f"    {call};",
            "}",
            "",
        ]
    )


def struct_packer(form: str) -> tuple[Callable[..., bytes], Callable[[bytes], Any]]:
    """What packs a kernel's struct, and what makes of it the value that a launch takes as one argument."""
    members = struct.Struct("=" + form)
    dtype = np.dtype((np.void, members.size))
    return members.pack, functools.partial(np.frombuffer, dtype=dtype)


@lru_cache(maxsize=64)
def header(name: str) -> str:
    """The text of a file of `kernels_cu/`: inside the installed package, or beside it in a checkout."""
    inside = resources.files("cupyfuse") / "kernels_cu" / name
    beside = Path(__file__).resolve().parents[2] / "kernels_cu" / name
    return inside.read_text() if inside.is_file() else beside.read_text()


def inlined(source: str) -> str:
    """The source with every header of ours in its place, once: what the compiler and its caches get to see."""
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
