"""Steps: the nodes that one launch computes, and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node, Shape
from ...ir.kinds import is_leaf, is_product
from .memory import base_of, stored_size


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan (see `Plan.steps`), over `domain`, the rows and columns of its elements.

    It computes the values `nodes` from `inputs` and writes `outputs`. It reads `repair_inputs` only where results need
    repair: in the exact forms of guards, and for elements that the hi/lo split cannot hold. `epilogue` is the row
    program that reads a product from the registers of the kernel that computes it; its nodes are among the step's.
    That kernel is our own, or with `by_library` cuBLASLt's, whose epilogue is the sum with a bias. `choice` says how
    the product runs where that is not what its node's `how` says. `columns` are the reductions down the columns of what
    a row program reads or computes, with the work behind them: a column step whose nodes are among the step's.
    """

    kind: str
    fused: tuple[str, ...]
    reads: int
    writes: int
    flops: int
    launches: int
    domain: Shape
    nodes: tuple[Node, ...] = field(repr=False)
    inputs: tuple[Node, ...] = field(repr=False)
    outputs: tuple[Node, ...] = field(repr=False)
    repair_inputs: tuple[Node, ...] = field(default=(), repr=False)
    epilogue: Step | None = field(default=None, repr=False)
    columns: Step | None = field(default=None, repr=False)
    by_library: bool = False
    choice: str = ""

    @cached_property
    def node_set(self) -> frozenset[Node]:
        return frozenset(self.nodes)

    @property
    def product(self) -> Node:
        """The product of a Gemm, among the splits of its operands and the nodes of its epilogue."""
        return next(n for n in self.nodes if is_product(n))

    @property
    def by_tiles(self) -> bool:
        """Whether our kernel of 16-bit operands computes a product, with its epilogue."""
        return self.epilogue is not None and not self.by_library and self.product.parts != 2

    @property
    def how(self) -> str:
        """How a product is computed, and why; empty for other steps."""
        return (self.choice or self.product.how) if self.kind == "Gemm" else ""


def step_of(
    kind: str, domain: Shape, nodes: list[Node], inputs: list[Node], outputs: list[Node], repair_inputs: list[Node]
) -> Step:
    """Make a step, whose bytes `with_bytes` fills in; a RowProgram that is one matrix-vector product is a MatVec."""
    if kind == "RowProgram" and _is_matvec(nodes, domain):
        kind = "MatVec"
    return Step(
        kind=kind,
        fused=(repr(nodes[0].call),) if kind == "Library" else tuple(map(_operation_name, nodes)),
        reads=0,
        writes=0,
        flops=sum(g.flops(n) for n in nodes),
        launches=sum(map(_launches, nodes)) if kind in ("Gemm", "Copy") else 1,
        domain=domain,
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        repair_inputs=tuple(repair_inputs),
    )


def parts_by_product(step: Step, products: Set[Node]) -> list[Step]:
    """Take a row program apart into those whose operations share nothing, if each of several reads products of its own.

    What reads none of the products stays together. The bytes are for `with_bytes` to fill in.
    """
    if step.kind != "RowProgram" or step.repair_inputs:
        return [step]
    parts: list[tuple[set[Node], list[Node]]] = []  # what connects the nodes of each, and these nodes
    for node in step.nodes:
        links = {node, *(base_of(i) for i in g.eager_inputs(node) if base_of(i) in products or i in step.node_set)}
        near = [p for p in parts if not p[0].isdisjoint(links)]
        nodes = [n for _, found in near for n in found]
        parts = [p for p in parts if p not in near] + [(links.union(*(p[0] for p in near)), [*nodes, node])]
    reading = [nodes for links, nodes in parts if not links.isdisjoint(products)]
    if len(reading) < 2:
        return [step]
    rest = [n for links, nodes in parts if links.isdisjoint(products) for n in nodes]
    found = []
    for nodes in [*reading, *([rest] if rest else [])]:
        chosen = set(nodes)
        read = {i for n in nodes for i in g.eager_inputs(n)} - chosen
        found.append(
            step_of(
                "RowProgram",
                step.domain,
                [n for n in step.nodes if n in chosen],
                [i for i in step.inputs if i in read],
                [n for n in step.outputs if n in chosen],
                [],
            )
        )
    return found


def _launches(node: Node) -> int:
    """Count the launches of a product, of a split, or of a copy: two for a product that another kernel finishes."""
    finished = node.op == "split_matmul" and (node.parts == 2 or node.unscaled)
    return 2 if finished or node.op == "put" else 1


def _operation_name(node: Node) -> str:
    return "matmul" if is_product(node) else node.op


def _is_matvec(nodes: list[Node], domain: Shape) -> bool:
    """Whether the only work along the rows is one product with a vector."""
    reductions = [n for n in nodes if n.reduction]
    if len(reductions) != 1 or reductions[0].op != "sum":
        return False
    product = reductions[0].inputs[0]
    full = [n for n in nodes if n.shape == domain and domain[1] != 1]
    return (
        product.op == "multiply"
        and full == [product]
        and {i.shape for i in product.inputs} == {domain, (1, domain[1])}
        and all(i.op != "const" for i in product.inputs)
    )


def fuse_splits(steps: list[Step]) -> list[Step]:
    """Fuse each split of an operand into the step of the first product that reads it."""
    result: list[Step] = []
    waiting: dict[Node, Step] = {}
    for step in steps:
        if step.kind == "Split":
            waiting[step.outputs[0]] = step
            continue
        splits = [waiting.pop(i) for i in step.inputs if i in waiting]
        if splits:
            own = [n for s in splits for n in s.outputs]
            nodes = [*own, *step.nodes]
            inputs = [*(i for s in splits for i in s.inputs), *(i for i in step.inputs if i not in own)]
            repair_inputs = [n for n in step.repair_inputs if n not in inputs]
            step = step_of("Gemm", step.domain, nodes, inputs, [*own, *step.outputs], repair_inputs)
        result.append(step)
    return [*result, *waiting.values()]


def fuse_scalar_steps(steps: list[Step]) -> list[Step]:
    """Fuse steps on scalar arguments, such as BatchNorm's counter, into the last row program with a reduction.

    Saves their launches.
    """
    hosts = [s for s in steps if s.kind in ("RowProgram", "MatVec") and any(n.reduction for n in s.nodes)]
    if not hosts or hosts[-1].domain[0] == 0:
        return steps
    host = hosts[-1]
    scalar = [
        s
        for s in steps
        if s.kind == "RowProgram"
        and s.domain == (1, 1) != host.domain
        and all(is_leaf(i) for i in s.inputs)
        and not s.repair_inputs
        and not {base_of(i) for i in s.inputs} & {base_of(i) for i in (*host.inputs, *host.repair_inputs)}
        and not any(base_of(i) in s.outputs for other in steps for i in (*other.inputs, *other.repair_inputs))
    ]
    if not scalar:
        return steps
    parts = [host, *scalar]
    merged = replace(
        host,
        fused=tuple(f for p in parts for f in p.fused),
        flops=sum(p.flops for p in parts),
        nodes=tuple(dict.fromkeys(n for p in parts for n in p.nodes)),
        inputs=tuple(dict.fromkeys(n for p in parts for n in p.inputs)),
        outputs=tuple(n for p in parts for n in p.outputs),
    )
    return [merged if s is host else s for s in steps if s not in scalar]


_MOST_COLUMN_REDUCTIONS = 16  # of a fused step: each takes registers and shared memory of all threads


def fuse_column_steps(steps: list[Step]) -> list[Step]:
    """Fuse each step of column reductions into a later one that reads all its matrices, if no later step reads it.

    So the gradients of a scale and of a bias read the cotangent once. A step reads nothing that the later one computes,
    since its layer is lower; results in place of arguments are placed once the steps are final.
    """
    result: list[Step] = []
    read_later: set[Node] = set()
    for step in reversed(steps):
        host = next((s for s in result if _takes_columns_of(s, step)), None)
        if host is None or read_later & set(step.outputs):
            result.insert(0, step)
        else:
            inputs = tuple(dict.fromkeys((*step.inputs, *host.inputs)))
            result[result.index(host)] = replace(
                host,
                fused=step.fused + host.fused,
                flops=step.flops + host.flops,
                nodes=tuple(dict.fromkeys((*step.nodes, *host.nodes))),
                inputs=inputs,
                outputs=(*step.outputs, *host.outputs),
                repair_inputs=tuple(n for n in host.repair_inputs if n not in inputs),
            )
        read_later.update(base_of(i) for i in (*step.inputs, *step.repair_inputs))
    return result


def _takes_columns_of(host: Step, step: Step) -> bool:
    """Whether a later step of column reductions reads all matrices that another one does, and has few reductions."""
    if not (host.kind == step.kind == "ColumnStats" and host.domain == step.domain) or step.repair_inputs:
        return False
    matrices = [i for i in step.inputs if i.shape == step.domain]
    reductions = sum(n.reduction for n in (*step.nodes, *host.nodes))
    return bool(matrices) and all(i in host.inputs for i in matrices) and reductions <= _MOST_COLUMN_REDUCTIONS


def stages_of(step: Step) -> dict[Node, int]:
    """Find the stage in which a row or column step computes each value; -1 if it depends on no element of the domain.

    A stage ends with reductions, and a value over the whole domain that reads what they gave belongs to the next one.
    """
    axis = 0 if step.kind == "ColumnStats" else 1
    found: dict[Node, int] = {}
    for node in step.nodes:
        reads_elements = node.shape == step.domain or (node.reduction and node.axis == axis)
        stage = 0 if reads_elements else -1
        for i in g.eager_inputs(node):
            if i in found:
                reduced = i.shape != step.domain and found[i] >= 0
                stage = max(stage, found[i] + 1 if reduced and node.shape == step.domain else found[i])
        found[node] = stage
    return found


def last_stage(step: Step) -> int:
    """Return the number of the last stage of a row program; the first one is stage 0."""
    return max(stages_of(step).values(), default=0)


def column_launches(domain: Shape) -> int:
    """Count the launches of a column step: one, and one that merges if blocks share the rows."""
    return 1 if column_splits(domain) == 1 else 2


def column_splits(domain: Shape) -> int:
    """Choose how many blocks share the rows of a strip of columns: as many as run at once, if they have enough rows.

    Few rows, and strips that are enough for a GPU, are not shared, which takes a launch less.
    """
    rows, cols = domain
    strips = max(1, -(-cols // COLUMN_STRIP))
    if rows < fewest_shared(cols) or strips >= _ENOUGH_STRIPS:
        return 1
    shares = min(_BLOCKS_OF_COLUMNS // strips, rows // _FEWEST_OF_A_BLOCK)
    return -(-rows // -(-rows // shares))  # each has rows


def fewest_shared(cols: int) -> int:
    """Return the rows from which blocks share those of a strip: of narrow ones more, which take a block no longer.

    An H200 adds up 4000 numbers in 4.6 us in one launch, in 6.2 in two.
    """
    return _FEW_SHARED * COLUMN_STRIP // min(max(cols, _NARROWEST), COLUMN_STRIP)


# Columns of a strip; blocks of 256 threads that an H200 runs at once, two on each multiprocessor; rows of whole strips
# that are worth a launch more, and of a block; and strips that are about one for each multiprocessor. Of 60 sums,
# moments and gradients of norms down 64 to 50257 columns, strips of 64 and 264 blocks take 1.05 of the best choice's
# time, half as many columns 1.11, twice the blocks 1.14.
COLUMN_STRIP, _BLOCKS_OF_COLUMNS, _FEW_SHARED, _FEWEST_OF_A_BLOCK, _ENOUGH_STRIPS = 64, 264, 512, 64, 128
_NARROWEST = 4  # columns that a block reads as fast as fewer


def row_shares(domain: Shape) -> int:
    """Choose how many blocks share a row in reductions along few, long rows: a power of two."""
    rows, cols = domain
    shortest = 8192 if rows <= _FEW_ROWS else 1 << 17  # elements that are worth a block of their own, and the merge
    shares = 1
    while rows * shares < _BLOCKS_OF_ROWS and cols // (2 * shares) >= shortest:
        shares *= 2
    return shares


# Rows that leave most of a GPU idle, and blocks that read rows at its full bandwidth.
_FEW_ROWS, _BLOCKS_OF_ROWS = 32, 512


def shares_rows(step: Step) -> bool:
    """Whether several blocks share each row of a row program: reductions of one stage, with no full-size result."""
    if row_shares(step.domain) == 1 or any(n.shape == step.domain for n in step.outputs):
        return False
    stages = stages_of(step)
    return any(n.reduction and n.axis == 1 for n in step.nodes) and max(stages.values(), default=0) == 0


def separate_stages(domain: Shape) -> bool:
    """Whether rows are so few, or so long, that what follows a reduction is a step of its own.

    Of a row, only a reduction can be shared by many blocks, and work without reductions by any number; a cluster of 8
    blocks holds about 460,000 float32 elements.
    """
    return row_shares(domain) > (8 if domain[1] <= 1 << 19 else 1)


def with_bytes(step: Step, storage: dict[Node, str]) -> Step:
    """Fill in the bytes of a step, which reads and writes each value once as it is stored, and its launches.

    Steps without elements do not run.
    """

    def nbytes(nodes: Iterable[Node]) -> int:
        return sum(stored_size(n) * dtypes.ITEMSIZE[storage[base_of(n)]] for n in dict.fromkeys(nodes))

    if step.domain[0] * step.domain[1] == 0 and all(n.size == 0 for n in step.outputs):
        return replace(step, reads=0, writes=0, launches=0)
    (last,) = step.nodes[-1:]
    if last.op == "concat":
        return replace(step, reads=0, writes=0, launches=0)  # its pieces are where they belong
    if last.op == "strided":
        # Only the elements of the view are read, repeated ones once.
        elements = math.prod(n for n, stride in last.dims if stride)
        reads = elements * dtypes.ITEMSIZE[storage[last]]
        return replace(step, reads=reads, writes=nbytes(step.outputs), launches=1)
    launches = step.launches
    if step.kind == "ColumnStats":
        launches = column_launches(step.domain)
    elif step.columns is not None or (step.kind in ("RowProgram", "MatVec") and shares_rows(step)):
        launches = 2
    return replace(step, reads=nbytes(step.inputs), writes=nbytes(step.outputs), launches=launches)
