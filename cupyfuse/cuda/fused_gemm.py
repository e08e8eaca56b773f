"""Kernels of 16-bit products with a row program as their epilogue: instances of `kernels_cu/gemm.cu`.

The operands may also be splits of float32 ones in one float16 part, whose scales the epilogue undoes.
Their parameters depend on the product and on the epilogue: tiles, stages, layouts of the operands, the emitted struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import devices
from ..ir.graph import Node
from ..ir.products import strip_transposes
from ..plan.schedule import Step, Tiles, state_size, tiles_of
from ..plan.schedule.tiles import TILE_ROWS
from .c_types import stored_type
from .config import Config, fitting_vec
from .emit import Writer
from .kernel import Kernel, translation_unit
from .parameters import Parameter
from .program import Program
from .staged_results import (
    CONSUMER_WARPS,
    PANEL_ALIGNMENT,
    are_shifted,
    map_members,
    panels_bytes,
    result_sizes,
    staging_functions,
    vectors_function,
    widest_panel,
)
from .tensor_map import BOX
from .totals import check_of_states
from .warpgroup import ARCHITECTURE, SHARED_BYTES, is_unrolled, write_multiply_add

THREADS, MERGE_THREADS = 384, 128
_MOST_STAGES = 6  # more hide no more latency
_LEAST_STAGES = {256: 4, 192: 4, 128: 5, 64: 6}  # by the columns of a tile: what a second panel has to leave
# Bytes of a row's states beside which 64 columns of a chunk fit in registers, or 32: of a logsumexp and three more
# reductions, or of one and a variance. With labels never 64: on an H200 the cross entropy behind
# 2048 x 768 x 50256, with logits stored, takes 317 us so, with 16 columns 368, and with 64, some of them spilled, 351.
_WIDE_STATE, _MEDIUM_STATE = 24, 32


@dataclass(frozen=True)
class GemmShape:
    """The template parameters of a product.

    Attributes
    ----------
    dtype : str
        Of the operands; of parts float16.
    tiles : Tiles
    transposed : tuple of bool
        Whether each operand is stored transposed: A as (k, m), B as (k, n).
    staged : int
        Bytes that all full results take together for one element.
    chunk : int
        Columns of a tile that the epilogue works on at once: they take registers.
    panel : int
        Columns of results that are stored at once, a multiple of `chunk`: they take shared memory.
    vec : int
        Elements per access of the epilogue's loads, 1 or 2.
    unrolled : bool
        Whether each chunk of a tile has code of its own, instead of a loop that copies each to the same registers.
    shifted : bool
        Whether rows of results may begin at any element, rather than at multiples of 16 bytes behind the first.
    odd : bool
        Whether the number of columns is odd.
    scaled : bool
        Whether the operands are parts of float32 ones, with scales.
    """

    dtype: str
    tiles: Tiles
    transposed: tuple[bool, bool]
    staged: int
    chunk: int
    panel: int
    vec: int
    unrolled: bool
    shifted: bool
    odd: bool
    scaled: bool = False

    @property
    def panels(self) -> int:
        """Panels of a warp: of two, one is stored while the other is computed."""
        return 1 if self.shifted or self._stages(2) < _LEAST_STAGES[self.tiles.columns] else 2

    @property
    def stages(self) -> int:
        """Pipeline stages of both operands that fit into shared memory."""
        return self._stages(self.panels)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self._shared_bytes(self.stages, self.panels)

    @property
    def boxes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The boxes in which each operand is copied, as (lines, elements of a line)."""
        share = self.tiles.columns // self.tiles.cluster
        return (BOX if self.transposed[0] else TILE_ROWS, BOX), (BOX if self.transposed[1] else share, BOX)

    @property
    def type(self) -> str:
        """The C++ type with these parameters."""
        tiles = f"{self.tiles.columns}, {self.stages}, {self.tiles.cluster}, {int(self.tiles.alternating)}"
        transposed = ", ".join(str(int(t)) for t in self.transposed)
        unroll = self.tiles.columns // self.chunk if self.unrolled else 1
        panels = f"{self.chunk}, {self.panel}, {self.panels}, {self.staged}"
        last = f"{unroll}, {int(self.shifted)}, {int(self.odd)}, {int(self.scaled)}"
        return f"Gemm<{stored_type(self.dtype)}, {tiles}, {transposed}, {panels}, {last}>"

    @property
    def _stage_bytes(self) -> int:
        return (TILE_ROWS + self.tiles.columns) * 2 * BOX

    def _stages(self, panels: int) -> int:
        left = SHARED_BYTES - self._shared_bytes(0, panels)
        return min(_MOST_STAGES, left // (self._stage_bytes + 16))

    def _shared_bytes(self, stages: int, panels: int) -> int:
        results = panels_bytes(panels, self.panel + 8 * self.shifted, self.staged)
        scales = CONSUMER_WARPS * 4 * self.tiles.columns if self.scaled else 0
        return 1023 + stages * (self._stage_bytes + 16) + PANEL_ALIGNMENT - 16 + results + scales


def program_of(step: Step, storage: dict[Node, str]) -> Program:
    """Analyse the epilogue of a product's step."""
    assert step.epilogue is not None
    return Program(step.epilogue, storage, step.product)


def widest_access(program: Program, row_stride_bits: int | None = None) -> int:
    """Return how many elements an epilogue may read at once; the parameters are those of `fitting_vec`.

    Of vectors of columns the last element is read alone.
    """
    return min(2, fitting_vec(program, row_stride_bits)) if program.full_inputs else 2


def shape_of(step: Step, program: Program, processors: int, vec: int, row_strides: Sequence[int] = ()) -> GemmShape:
    """Choose the template parameters of a product for a GPU of so many multiprocessors.

    `row_strides` are those of the results of its size; by default they have no gaps.
    """
    scaled = step.product.op == "split_matmul"
    transposed = (False, False)  # splits are row-major
    if not scaled:
        transposed = strip_transposes(step.product.inputs[0])[1], not strip_transposes(step.product.inputs[1])[1]
    sizes, shifted = result_sizes(program), are_shifted(program, row_strides)
    staged = sum(sizes)
    assert step.epilogue is not None
    chunk = _chunk_of(step, program, vec, staged, shifted)
    panel = widest_panel(sizes) if sizes and not shifted else chunk
    tiles = tiles_of(step, processors)
    unrolled = is_unrolled(step.epilogue)
    dtype = "float16" if scaled else step.product.dtype
    odd = step.domain[1] % 2 == 1
    return GemmShape(dtype, tiles, transposed, staged, min(chunk, panel), panel, vec, unrolled, shifted, odd, scaled)


def _chunk_of(step: Step, program: Program, vec: int, staged: int, shifted: bool) -> int:
    """Return the columns of a tile that the epilogue has at once.

    The inputs of a chunk are all in flight at once: of wider chunks ptxas spills some. Beside shifted results of 4
    bytes in wide chunks, fewer stages would fit into shared memory. On an H200 a bias behind 16384 x 768 x 3072 takes
    119 us with 64 columns, 127 with 32; with a residual 32 take 175, 16 take 229.
    """
    epilogue = step.epilogue
    assert epilogue is not None
    state = state_size(epilogue)
    if staged > 4 or program.reads_columns > 2 or vec == 1 or state > _MEDIUM_STATE:
        return 16
    labels = any(n.op == "positions" for n in epilogue.nodes)
    reads = program.reads_columns > 1 or program.full_inputs
    scaled = step.product.op == "split_matmul"
    return 32 if reads or labels or scaled or (shifted and staged > 2) or state > _WIDE_STATE else 64


def emit_gemm(program: Program, shape: GemmShape) -> tuple[Kernel, ...]:
    """Emit the kernel of a product with its epilogue, and for reductions one that merges their states."""
    writer = _EpilogueWriter(program, mapped=not shape.shifted)
    struct = f"// the product and: {', '.join(program.step.fused) or 'nothing'}\n{writer.emit_struct()}"
    if program.accumulators(0):
        struct += f"\n{check_of_states(program.step)}"
    check = f'static_assert({shape.type}::shared == {shape.shared}, "what a launch asks for");'
    instruction = write_multiply_add(shape.tiles.columns, shape.dtype, shape.transposed)
    config = Config("gemm", THREADS, shape.chunk, shape.vec)
    cluster = shape.tiles.cluster
    source = translation_unit(
        *("gemm", f"{instruction}\n{check}\n\n{struct}", "gemm_kernel", f"gemm<{shape.type}, {shape.vec}>(p)", THREADS),
        cluster=cluster,
        by_address=True,
        follows=True,
    )
    kernels = [Kernel("gemm_kernel", source, tuple(program.parameters), config, ARCHITECTURE, shape.shared, cluster)]
    if program.accumulators(0):
        call = f"merge_shares<Program, {MERGE_THREADS}>(p)"
        source = translation_unit("gemm", struct, "gemm_merge_kernel", call, MERGE_THREADS, by_address=True)
        config = Config("gemm", MERGE_THREADS, 1, 1)
        kernels.append(Kernel("gemm_merge_kernel", source, tuple(program.parameters), config, ARCHITECTURE))
    return tuple(kernels)


def kernels_of(step: Step, storage: dict[Node, str]) -> tuple[Kernel, ...]:
    """Emit the kernels of a product's step for the default GPU, reading pairs of elements where columns allow it."""
    program = program_of(step, storage)
    processors = devices.find(devices.DEFAULT).processors
    return emit_gemm(program, shape_of(step, program, processors, widest_access(program)))


class _EpilogueWriter(Writer):
    """Writes the struct of an epilogue, which has more members than a row program's: see `gemm.cu`."""

    outlines = False  # the templates have such a function, of several elements

    def __init__(self, program: Program, mapped: bool):
        super().__init__(program)
        self._mapped = mapped  # whether results have tensor maps

    def declare_members(self) -> list[str]:
        results = map_members(self.program) if self._mapped else ""
        own = f"TensorMap a; TensorMap b; {results} i64 depth;"
        partial = "struct Totals0; Totals0* partial; i64 shares;"
        product = self.program.product
        scaled = product is not None and product.op == "split_matmul"
        constant = f"static constexpr bool scaled = {str(scaled).lower()};"
        return [constant, own, *(["Matrix left; Matrix right;"] if scaled else []), *super().declare_members(), partial]

    def emit_store(self, stage: int, writes: list[Parameter]) -> list[str]:
        """Emit functions that visit matrices, vectors of columns, results and where these go, as lines."""
        matrices = " ".join(f"visit({p.name}, {p.name}_rows);" for p in self.program.full_inputs)
        return [
            f"static constexpr int read = {self.program.input_bytes};",
            "template <class Visit>",
            f"__device__ void matrices(At<{stage}>, const Visit& visit) const {{ {matrices} }}",
            *vectors_function(self.program, stage),
            *staging_functions(stage, writes, self._mapped),
        ]
