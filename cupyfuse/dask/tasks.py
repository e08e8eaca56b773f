"""What workers run: a graph on chunks, and the merge of states.

A program travels as data, and is planned and compiled once by each process for each memory layout of its operands.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..api import arrays
from ..api.shard_graphs import Cache, load_graph, merge_states
from ..devices import Device
from ..ir.flat import flatten, unflatten
from ..ir.graph import Graph, Node
from ..settings import Settings

_executables = Cache()


@dataclass(frozen=True)
class Options:
    """The options of a function, and the settings that were in force where it was called."""

    precision: str
    epilogues: str
    max_workspace: int
    keep_halves: bool

    def settings(self, device: Device | None) -> Settings:
        return Settings(self.precision, device, self.max_workspace, self.keep_halves, self.epilogues)


class Program:
    """A graph that tasks run, with all that a plan of it needs but the memory layouts of its operands.

    Attributes
    ----------
    name : str
        Of the function.
    graph : Graph
    axes : tuple
        Of each result.
    options : Options
    token : str
        The same for equal programs.
    """

    def __init__(self, name: str, graph: Graph, axes: Sequence[Any], options: Options):
        self.name, self.graph, self.axes, self.options = name, graph, tuple(axes), options
        self._packed = pickle.dumps((name, flatten(graph), self.axes, options))
        self.token = hashlib.sha256(self._packed).hexdigest()[:32]

    def __reduce__(self) -> Any:
        return _unpack, (self._packed,)

    def __dask_tokenize__(self) -> str:
        return self.token


def _unpack(packed: bytes) -> Program:
    name, graph, axes, options = pickle.loads(packed)
    return Program(name, unflatten(*graph), axes, options)


@dataclass(frozen=True)
class Cut:
    """The part of an operand that a task reads: a slice for each axis, where it has others."""

    slices: tuple[slice | None, ...]

    def __call__(self, array: Any) -> Any:
        return array[tuple(slice(None) if s is None else s for s in self.slices)]


@dataclass(frozen=True)
class Block:
    """How a block differs from others of the same layer.

    Attributes
    ----------
    program : int
        The number of its program.
    cuts : tuple of Cut or None
        The part of each operand that is read.
    positions : tuple of int or None
        The operands that are positions along an axis; None for those that are arrays.
    """

    program: int
    cuts: tuple[Cut | None, ...]
    positions: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Shared:
    """What the blocks of a layer share: one value, since Dask lets no other worker take tasks that need many.

    Attributes
    ----------
    programs : tuple of Program
    arrays : tuple of array or None
        The operands that are whole; None for those that are chunks or positions.
    """

    programs: tuple[Program, ...]
    arrays: tuple[Any, ...]

    def __sizeof__(self) -> int:
        """Return the bytes of the arrays too, from which Dask tells how long a worker takes to fetch them."""
        return 4096 * len(self.programs) + sum(getattr(array, "nbytes", 0) for array in self.arrays)


def run_block(shared: Shared, block: Block, *chunks: Any) -> Any:
    """Run the program of a block on chunks, as `run`."""
    rest = iter(chunks)
    operands = []
    for array, position in zip(shared.arrays, block.positions, strict=True):
        if position is not None:
            operands.append(position)
        else:
            operands.append(next(rest) if array is None else array)
    return run(shared.programs[block.program], block.cuts, *operands)


def run(program: Program, cuts: Sequence[Cut | None], *operands: Any) -> Any:
    """Run a program on chunks.

    Parameters
    ----------
    program : Program
    cuts : sequence of Cut or None
        The part of each operand that is read.
    *operands
        Arrays, or numbers: positions along an axis.

    Returns
    -------
    array, or list of arrays
        The results of the program; a list if there are several.
    """
    found: list[Any] = []
    for node, value, cut in zip(program.graph.inputs, operands, cuts, strict=True):
        if type(value) is int:
            found.append(np.full((1, 1), value, np.int64))
        else:
            array = np.asarray(value) if isinstance(value, np.generic) else arrays.import_array(value, node.name).array
            found.append(_checked(array if cut is None else cut(array), node))
    lead = next((a for a in found if arrays.is_cupy(a)), found[0] if found else None)
    found = [arrays.on_device_of(lead, a) for a in found]
    places = [a.data.device_id if arrays.is_cupy(a) else "CPU" for a in found]
    key = program.token, *places, *((a.shape, a.strides) for a in found)

    def load() -> Any:
        return load_graph(program.options.settings, program.name, program.graph, program.axes, found)

    results = _executables.get(key, load)(found)
    return results[0] if len(results) == 1 else list(results)


def _checked(array: Any, node: Node) -> Any:
    """Check a chunk against what its collection said of it."""
    shape = (math.prod(array.shape[:-1]), array.shape[-1]) if array.ndim else (1, 1)
    if shape != node.shape or dtypes.name_of(array.dtype) != node.dtype:
        raise ValueError(
            f"argument {node.name!r}: a chunk has shape {array.shape} and dtype {array.dtype}, which is not what its "
            f"array says (of {node.dtype}, {node.shape[0]} x {node.shape[1]} elements); give the function that makes "
            "it the right meta, dtype and chunks"
        )
    return array


def merge(rules: Sequence[str], *states: Any) -> Any:
    """Merge states of some rules, each a list of arrays, or the array if that is all; so is what is returned."""
    merged = merge_states(rules, [state if isinstance(state, list) else [state] for state in states])
    return merged[0] if len(merged) == 1 else merged


def state_of(*parts: Any) -> list[Any]:
    """Collect the parts of a block's state, which several tasks compute, into one value."""
    return list(parts)
