"""Launches of emitted kernels: specified from shapes and strides, compiled, then bound to a runtime.

A launch says which kernels it needs and how much workspace before anything is compiled, so that the engine can compile
the kernels of all launches in parallel and lay out one workspace for them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import dtypes
from ..cuda.config import Access, Config, accesses
from ..cuda.configure import default_config
from ..cuda.kernel import Kernel
from ..cuda.launch import sequence
from ..cuda.parameters import FULL, SCALAR, Parameter
from ..cuda.program import Program
from ..cuda.runtime import Runtime
from ..cuda.shared_rows import turns_of_clusters
from ..cuda.sources import emit_kernels
from ..cuda.structs import Addresses, KernelCall, Launch, Struct, StructLaunch, divisor, integers, number, pointer
from ..errors import ClusterError
from ..ir.graph import Node
from ..plan.schedule import Step, state_size

_MAX_BLOCKS, _MOST_BLOCKS_Y = (1 << 31) - 1, (1 << 16) - 1
# Threads of elementwise work have several packs, where enough blocks are left for all multiprocessors.
_ENOUGH_BLOCKS, _PACKS_A_THREAD = 1 << 11, 8


@dataclass(frozen=True)
class Place:
    """A view of device memory: the slot of its address, and its strides and offset from there in elements."""

    slot: int
    row_stride: int
    col_stride: int
    offset: int = 0

    @property
    def transposed(self) -> Place:
        return Place(self.slot, self.col_stride, self.row_stride, self.offset)

    def pointer(self, dtype: str) -> Struct:
        """Return a pointer to the view's first element, which is of a dtype, as member of a struct."""
        return pointer(self.slot, self.offset * dtypes.ITEMSIZE[dtype])

    def slice(self, row: int, down: int, col: int, across: int) -> Place:
        """Return the view of every `down`-th row from `row` on, and every `across`-th column from `col` on."""
        start = self.offset + row * self.row_stride + col * self.col_stride
        return Place(self.slot, self.row_stride * down, self.col_stride * across, start)


@dataclass(frozen=True)
class LaunchSpec:
    """A launch before its kernels are compiled.

    Attributes
    ----------
    bind : callable
        `bind(runtime, slot)` loads the kernels and returns the launch, for `sequence`; the slot holds the workspace's
        address, -1 if there is none.
    kernels : tuple of Kernel
    workspace : int
        Bytes of device memory that the launch needs for itself; 0 for none.
    """

    bind: Callable[[Runtime, int], StructLaunch | Launch]
    kernels: tuple[Kernel, ...] = ()
    workspace: int = 0


class KernelArguments:
    """The struct of arguments of an emitted kernel, with places for addresses and numbers of a call.

    Parameters
    ----------
    program : Program
    place : callable
        Returns the `Place` of a value.
    numbers : int
        Slot of the numbers of a call; -1 if there are none.
    stores_vectors : bool
        Whether results are stored in vectors; those of products go through shared memory, to any address.

    Attributes
    ----------
    struct : Struct
    vector_pointers : list of (slot of the address, bytes from there, itemsize)
        The pointers that are accessed in vectors.
    read_pointers, written_pointers : list of (slot of the address, bytes from there, itemsize)
        Those among them that have an element for each of the program's.
    read_strides, written_strides : list of int
        Row strides of these arrays, if the program has several rows.
    """

    def __init__(self, program: Program, place: Callable[[Node], Place], numbers: int, stores_vectors: bool = True):
        self.rows, self._stores_vectors = program.domain[0], stores_vectors
        self.struct = Struct()
        self.vector_pointers: list[tuple[int, int, int]] = []
        self.read_pointers: list[tuple[int, int, int]] = []
        self.written_pointers: list[tuple[int, int, int]] = []
        self.read_strides: list[int] = []
        self.written_strides: list[int] = []
        for parameter in program.parameters:
            if parameter.is_number:
                self.struct += number(float(parameter.node.value), parameter.node.number, numbers)
            else:
                self._add_array(parameter, place(parameter.node), program.in_vectors(parameter))

    def _add_array(self, parameter: Parameter, place: Place, in_vectors: bool) -> None:
        """Append the members for an array: a pointer, and the strides that the kernel takes."""
        start = place.offset * dtypes.ITEMSIZE[parameter.dtype]
        self.struct += pointer(place.slot, start)
        if parameter.has_rows:
            self.struct += integers(place.row_stride)
        if parameter.has_cols:
            self.struct += integers(place.col_stride)
        if parameter.has_repeats:
            repeats = parameter.node.repeats
            assert repeats is not None
            for count in repeats[:3]:
                self.struct += divisor(count)
            self.struct += integers(repeats.apart or repeats.inner, repeats.between, repeats.within)
        if parameter.written and not self._stores_vectors:
            return
        found = (place.slot, start, dtypes.ITEMSIZE[parameter.dtype])
        if in_vectors:
            self.vector_pointers.append(found)
        if in_vectors and parameter.extent == FULL:
            written = parameter.written
            (self.written_pointers if written else self.read_pointers).append(found)
            strides = self.written_strides if written else self.read_strides
            strides += [place.row_stride] if self.rows > 1 else []

    @property
    def row_stride_bits(self) -> int:
        """Bitwise or of all row strides, whose common powers of two limit the vector width."""
        strides = (*self.read_strides, *self.written_strides)
        return functools.reduce(lambda bits, stride: bits | abs(stride), strides, 0)

    def are_aligned(self, addresses: Addresses, vec: int) -> bool:
        """Whether all pointers that are accessed in vectors are multiples of `vec` elements."""
        return all((addresses[slot] + start) % (vec * size) == 0 for slot, start, size in self.vector_pointers)

    def are_shifted_alike(self, addresses: Addresses, vec: int, apart: bool) -> bool:
        """Whether rows begin at the same place in a vector of `vec` elements: all, or if `apart` those written."""
        pointers = self.written_pointers if apart else (*self.read_pointers, *self.written_pointers)
        return len({(addresses[slot] + start) // size % vec for slot, start, size in pointers}) <= 1

    def aligned_vec(self, addresses: Addresses, widest: int) -> int:
        """Return the largest number of elements, `widest` over a power of two, that all pointers are aligned to."""
        vec = widest
        while vec > 1 and not self.are_aligned(addresses, vec):
            vec //= 2
        return vec

    def launch_by_alignment(
        self,
        widest: Access,
        load: Callable[[Access], StructLaunch],
        choose: Callable[[Addresses], Access] | None = None,
    ) -> StructLaunch:
        """Return a launch that takes the variant of a kernel for the alignment of a call's pointers.

        `load` loads the variant for an access: the widest, for pointers that are all aligned, at once, others on their
        first use. `choose` returns the access for addresses that are not all aligned; by default a narrower one.
        """
        variants: dict[Access, Launch] = {}
        aligned = load(widest)

        def launch_other(addresses: Addresses, stream: Any) -> None:
            access = choose(addresses) if choose else Access(self.aligned_vec(addresses, widest.vec))
            if access not in variants:
                variants[access] = sequence([aligned if access == widest else load(access)])
            variants[access](addresses, stream)

        alignment = max((widest.vec * size for *_, size in self.vector_pointers), default=1)
        checked = [(slot, start) for slot, start, _ in self.vector_pointers]
        return replace(aligned, aligned=checked, alignment=alignment, otherwise=launch_other)


class KernelLaunch:
    """The launch of a step's emitted kernel, with a variant for each vector width that the pointers may allow.

    Parameters
    ----------
    step : Step
    storage : dict
        The dtype in which each value in memory is stored.
    place : callable
        Returns the `Place` of a value.
    flag : int
        Slot of the address of the flag that a conditional launch reads; -1 if the launch is unconditional.
    numbers : int
        Slot of the numbers of a call; -1 if there are none.
    clusters : bool
        Whether the GPU has clusters of blocks.
    """

    def __init__(
        self,
        step: Step,
        storage: dict[Node, str],
        place: Callable[[Node], Place],
        flag: int,
        numbers: int,
        clusters: bool,
    ):
        self.program = Program(step, storage)
        self.rows, self.cols = step.domain
        self.flag = flag
        self.arguments = KernelArguments(self.program, place, numbers)
        self.clusters = clusters
        if self._is_one_row():
            self.rows, self.cols = 1, self.rows * self.cols
            self.accesses = list(accesses(self.program, cols=self.cols))
        else:
            strides = self.arguments.read_strides, self.arguments.written_strides
            self.accesses = list(accesses(self.program, *strides))
        self.config = default_config(self.program, self.accesses[0], clusters)
        self.kernels = emit_kernels(self.program, self.config, conditional=flag >= 0)

    def _is_one_row(self) -> bool:
        """Whether pointwise work runs over arrays without gaps, so that all rows are one of more elements."""
        program = self.program
        if program.by_columns or any(n.reduction or n.op == "positions" for n in program.step.nodes):
            return False
        plain = all(p.is_number or (p.extent in (FULL, SCALAR) and not p.repeats) for p in program.parameters)
        full = {p.extent for p in program.outputs.values()} == {FULL}
        strides = (*self.arguments.read_strides, *self.arguments.written_strides)
        return plain and full and all(stride == self.cols for stride in strides)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self.bind, self.kernels, self._partial_bytes() if self.config.merges else 0)

    def _partial_bytes(self) -> int:
        """Return the bytes of the totals that blocks sharing a column or a row leave for the merge."""
        if self.config.shares == 1:
            return 1
        columns = self.program.step if self.program.by_columns else self.program.columns
        count, reducing = (self.rows, self.program.step) if columns is None else (self.cols, columns)
        return self.config.shares * count * state_size(reducing)

    def bind(self, runtime: Runtime, partial: int) -> StructLaunch:
        """Load the kernels; `partial` is the slot of the workspace."""

        def load(access: Access) -> StructLaunch:
            try:
                if access == self.accesses[0]:
                    return self._load(runtime, partial, self.config, self.kernels)
                return self._load_for(access, self.clusters, runtime, partial)
            except ClusterError as error:
                warnings.warn(f"{error}, so rows are read from memory for each stage", RuntimeWarning, stacklevel=2)
                return self._load_for(access, False, runtime, partial)

        return self.arguments.launch_by_alignment(self.accesses[0], load, self._choose)

    def _load_for(self, access: Access, clusters: bool, runtime: Runtime, partial: int) -> StructLaunch:
        """Load the kernels for an access, with or without clusters."""
        config = default_config(self.program, access, clusters)
        return self._load(runtime, partial, config, emit_kernels(self.program, config, conditional=self.flag >= 0))

    def _choose(self, addresses: Addresses) -> Access:
        """Return the widest access that the alignment of a call's pointers allows."""

        def fits(access: Access) -> bool:
            if access.shifted:
                return self.arguments.are_shifted_alike(addresses, access.vec, access.apart)
            return self.arguments.are_aligned(addresses, access.vec)

        return next(filter(fits, self.accesses), self.accesses[-1])

    def _load(self, runtime: Runtime, partial: int, config: Config, kernels: tuple[Kernel, ...]) -> StructLaunch:
        """Load the kernels of one variant; they are launched one after the other with the same struct."""
        struct = self.arguments.struct + integers(self.rows, self.cols)
        if config.merges:
            struct += pointer(partial) + integers(config.shares)
        if self.flag >= 0:
            struct += pointer(self.flag)
        functions = [runtime.function(kernel) for kernel in kernels]
        at_once = runtime.processors * config.blocks if config.cluster == 1 else runtime.clusters_at_once(kernels[0])
        grids = _grids(config, self.rows, self.cols, at_once)
        threads = config.threads, config.merge_threads  # the second kernel is the merge
        calls = [
            KernelCall(function, (max(1, x), y, 1), (count, 1, 1), kernel.shared)
            for function, kernel, (x, y), count in zip(functions, kernels, grids, threads, strict=False)
        ]
        return StructLaunch(calls, struct)


def _grids(config: Config, rows: int, cols: int, at_once: int) -> list[tuple[int, int]]:
    """Return the blocks along x and y of a template's kernel, and of the one that merges.

    `at_once` is how many clusters of row_shared, or blocks, the GPU has room for at once.
    """
    if config.template in ("column_stats", "row_columns"):
        strips = (-(-cols // config.group), config.shares)
        blocks = strips if config.template == "column_stats" else (config.shares, 1)
        return [blocks, (-(-cols // config.merged_columns), 1)]
    if config.template == "row_shares":
        return [(config.shares, max(1, min(rows, _MOST_BLOCKS_Y))), (min(rows, _MAX_BLOCKS), 1)]
    return [(_thread_blocks(config, rows, cols, at_once), 1)]


def _thread_blocks(config: Config, rows: int, cols: int, at_once: int) -> int:
    """Return the number of thread blocks that a row template is launched with."""
    if config.template == "row_lanes":
        blocks = -(-rows // (config.threads // config.group * config.rows))
    elif config.template == "elementwise":
        # As many as elementwise.cu counts.
        packs = 1 + (cols + config.vec - 2) // config.vec if config.shifted else cols // config.vec
        several = max(1, min(_PACKS_A_THREAD, -(-rows * packs // config.threads) // _ENOUGH_BLOCKS))
        # Of the same columns in several rows, if there are so many.
        packs_at_once = -(-rows // several) * packs if rows >= several else -(-rows * packs // several)
        blocks = -(-packs_at_once // config.threads)
    else:
        teams = _teams(config, rows, at_once) if config.template == "row_shared" else -(-rows // config.rows)
        blocks = min(teams, _MAX_BLOCKS // config.cluster) * config.cluster
    return max(1, min(blocks, _MAX_BLOCKS))


def _teams(config: Config, rows: int, at_once: int) -> int:
    """Return how many clusters, or single blocks, row_shared is launched with; the GPU has room for `at_once` of them.

    Those that copy values of columns do so once each; all rows of one have to begin at the same place in a pack. A
    cluster that has its multiprocessors to itself begins the next row sooner than another would have room.
    """
    if config.columns:
        places = config.vec if config.shifted else 1
        turns = turns_of_clusters(config.cluster, at_once, places)
        clusters = min(rows, at_once * max(1, min(turns, rows // (at_once * config.rows))))
        return clusters if clusters == rows else max(1, clusters // places) * places
    if config.cluster > 1 and config.blocks == 1:
        return min(rows, at_once)
    return -(-rows // config.rows)
