"""Products by our own kernels, with the row program behind one of them as its epilogue.

In the kernel of 16-bit products (`kernels_cu/gemm.cu`), which also multiplies splits in one part where `products.py`
chose it for them, the row program reads the product from registers. Pointwise results are written at once. Reductions
leave a state for each row and tile, which a second kernel merges: the product itself is not written, unless another
step reads it. A row program of several stages is cut in two: the kernel runs the first stage and writes what the others
read. Values of columns alone, which it would compute for every row, are a step of their own before it. Or the product
is stored rounded, with its bias, for a row program behind it (`rounded.py`): by our kernel, or by the library.

The kernels of products from splits in two parts (`kernels_cu/split_gemm.cu`, `split_repair.cu`) take pointwise row
programs alone: an element that has to be repaired would be part of a reduction already.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from ...settings import Settings
from ..rounding import bias_added, is_16_bit_product
from .columns import take_columns_out
from .memory import Layout, base_of
from .rounded import STORED_ROUNDED, WORTH, can_add_bias, cut_behind, rounded_value
from .steps import Step, stages_of, step_of, with_bytes
from .tiles import (
    LINE,
    MOST_STAGED,
    last_stage,
    library_time,
    own_time,
    split_epilogue_time,
    stream_time,
    strip_transposes,
    takes_epilogues,
)

_GAIN = 0.985  # of the library's time, what our kernel may take at most
_HOW = "own {} product with float32 sums"
_MOST_COLUMNS = 2  # vectors of columns that the epilogue of a split product reads, where that was measured to gain
_MOST_MATRICES = 2  # besides the product, that the epilogue of a split product reads: their elements take registers


def store_step(product: Node) -> Step:
    """Return the epilogue that stores a product."""
    return step_of("RowProgram", product.shape, [], [product], [product], [])


def fuse_epilogues(
    steps: Sequence[Step],
    storage: dict[Node, str],
    results: Collection[Node],
    layouts: dict[int, Layout],
    settings: Settings,
) -> list[Step]:
    """Give 16-bit products to our kernel, and row programs to our kernels as epilogues, where that is faster.

    A large 16-bit product may be stored rounded instead, by our kernel or by the library. Products from splits in one
    part are our kernel's already, unless they are `unscaled`: only their epilogue is to be decided.

    Parameters
    ----------
    steps : sequence of Step
    storage : dict
        The dtype in which each value is stored; a step that is cut in two adds what its first part writes.
    results : collection of Node
        Values that are read after the last step.
    layouts : dict
        Memory layouts of the arguments.
    settings : Settings
    """
    found, device = list(steps), settings.device
    if device is None or settings.epilogues == "never":
        return found
    for step in steps:
        if step.kind != "Gemm":
            continue
        product, fused = step.product, None
        if product.op == "split_matmul" and product.parts == 2:
            fused = _fuse_pointwise_reader(step, found, storage, product in results)
            if fused is not None and settings.epilogues == "measured" and not fused.is_worth_splitting(device):
                fused = None
        elif is_16_bit_product(product) and takes_epilogues(settings):
            reason = _reason_against_product(product, layouts)
            measured = settings.epilogues == "measured"
            forms = _store_rounded(step, found, storage, results, layouts, own=not reason) if measured else []
            if not reason:
                fused = _fuse_first_reader(step, found, storage, product in results)
                reason = fused.reason_for_library(device) if measured else ""
            if measured:
                other = _biased_by_library(step, found, storage, results, layouts)
                best = math.inf if fused is None or reason else fused.seconds(device)
                if other is not None and other.seconds(device) < _GAIN * min(best, other.library_seconds(device)):
                    fused, reason = other, ""
            if forms:
                rounded = min(forms, key=lambda form: form.seconds(device))
                unrounded = rounded.library_seconds(device) if fused is None or reason else fused.seconds(device)
                if rounded.seconds(device) < WORTH * unrounded:
                    fused, reason = rounded, ""
            if reason:
                found[found.index(step)] = replace(step, choice=f"{step.how}, rather than our own kernel: {reason}")
                continue
        elif product.op == "split_matmul" and not product.unscaled:
            fused = _fuse_first_reader(step, found, storage, product in results)
            if settings.epilogues == "measured" and fused.tail is not None:
                stored = _stored(step, storage, "the row program is faster alone")
                if stored.seconds(device) + _stream_seconds([fused.tail], device) < fused.seconds(device):
                    fused = stored
        if fused is not None:
            storage.update(fused.storage)
            found = fused.replace_in(found)
    return found


def _reason_against_product(product: Node, layouts: dict[int, Layout]) -> str:
    """Explain why our kernel cannot compute a 16-bit product; empty if it can."""
    if 0 in product.shape or product.inputs[0].shape[1] == 0:
        return "the product is empty"
    for operand in product.inputs:
        matrix, _ = strip_transposes(operand)
        layout = layouts.get(matrix.argument) if matrix.op == "input" else None
        if matrix.op == "slice" or (layout is not None and not layout.contiguous):
            return "an operand is not contiguous"
        count, length = matrix.shape
        if count > 1 and length % LINE:
            return f"rows of {length} elements do not begin at multiples of 16 bytes, as the TMA asks"
        if max(count, length) >= 1 << 31:
            return "an operand is longer than the TMA counts"
    return ""


@dataclass(frozen=True)
class _FusedProduct:
    """A product with its epilogue.

    Attributes
    ----------
    plain : the step of the product alone
    gemm : the step of the product with its epilogue
    tail : the row program that became the epilogue, whole or in part; None if the epilogue only stores the product
    rest : the later stages of the tail; None if it was not cut in two
    columns : the step of the tail's values of columns; None if it computes none
    storage : dtypes of the values that the cuts store
    """

    plain: Step
    gemm: Step
    tail: Step | None
    rest: Step | None
    columns: Step | None
    storage: dict[Node, str]

    def replace_in(self, steps: list[Step]) -> list[Step]:
        """Replace the plain product and the tail by the fused steps, in the place of the later one.

        Where steps in between read what the product's step writes beside the product, such as the split of an operand
        that several products share, that is the place of the product (`_is_needed_before`).
        """
        last = self.plain if self.tail is None or _is_needed_before(self.tail, self.plain, steps) else self.tail
        result = []
        for step in steps:
            if step is last:
                result += [s for s in (self.columns, self.gemm, self.rest) if s is not None]
            elif step not in (self.plain, self.tail):
                result.append(step)
        return result

    def library_seconds(self, device: Device) -> float:
        """Estimate the time of the plain product by the library, and of the tail."""
        return library_time(self.plain, device) + _stream_seconds([self.tail], device)

    def seconds(self, device: Device) -> float:
        """Estimate the time of the product, by the library if it has no epilogue, and of what is left of the tail."""
        product = own_time if self.gemm.by_tiles else library_time
        return product(self.gemm, device) + _stream_seconds([self.columns, self.rest], device)

    def reason_for_library(self, device: Device) -> str:
        """Explain that the library is no slower, by both estimates; empty if it is slower."""
        plain, own = self.library_seconds(device), self.seconds(device)
        if own < _GAIN * plain:
            return ""
        return f"{plain * 1e6:.3g} us, where that would take {own * 1e6:.3g} us"

    def is_worth_splitting(self, device: Device) -> bool:
        """Whether the epilogue of a split product takes less than its row program would, which reads the product.

        Guards, and more vectors of columns, take so many registers that some are spilled: BatchNorm behind
        4096 x 4096 x 4096 took 143 us on an H100, and its row program 52.
        """
        assert self.tail is not None and self.gemm.epilogue is not None
        epilogue = self.gemm.epilogue
        columns = sum(1 == n.shape[0] < n.shape[1] for n in epilogue.inputs)
        if columns > _MOST_COLUMNS or any(n.op == "guard" for n in epilogue.nodes):
            return False
        own = split_epilogue_time(self.gemm, device)
        if self.columns is not None:
            own += stream_time(self.columns, device, 1)
        return own < stream_time(self.tail, device, 1)


def _stream_seconds(steps: Iterable[Step | None], device: Device) -> float:
    """Estimate the time of row programs."""
    return sum(stream_time(s, device, last_stage(s) + 1) for s in steps if s is not None)


def _fuse_pointwise_reader(
    step: Step, steps: list[Step], storage: dict[Node, str], is_result: bool
) -> _FusedProduct | None:
    """Make the first step that reads a split product its epilogue; None if it cannot be."""
    product = step.product
    readers = [s for s in steps if product in map(base_of, (*s.inputs, *s.repair_inputs))]
    if not readers or _reason_against_tail(readers[0], product) or not _is_pointwise(readers[0]):
        return None
    if _is_needed_before(readers[0], step, steps):
        written = {n for s in _between(readers[0], step, steps) for n in s.outputs}
        if any(base_of(i) in written for i in readers[0].inputs):
            return None  # the tail must follow steps that the product must precede
    columns, tail, vectors = take_columns_out(readers[0], steps)
    how = f"{step.how}; the row program its epilogue"
    gemm = _with_epilogue(step, tail, is_result or len(readers) > 1, {**storage, **vectors}, how)
    columns = None if columns is None else with_bytes(columns, {**storage, **vectors})
    return _FusedProduct(step, gemm, readers[0], None, columns, vectors)


def _between(tail: Step, step: Step, steps: list[Step]) -> list[Step]:
    """Return the steps between that of a product and its tail."""
    return steps[steps.index(step) + 1 : steps.index(tail)]


def _is_needed_before(tail: Step, step: Step, steps: list[Step]) -> bool:
    """Whether a step before the tail of a product reads something that the product's step writes."""
    return any(base_of(i) in step.outputs for s in _between(tail, step, steps) for i in (*s.inputs, *s.repair_inputs))


def _is_pointwise(tail: Step) -> bool:
    """Whether a row program computes each element of its results from the same element of few matrices."""
    plain = not any(n.reduction for n in tail.nodes) and all(n.shape == tail.domain for n in tail.outputs)
    return plain and sum(n.shape == tail.domain for n in tail.inputs) <= 1 + _MOST_MATRICES


def _fuse_first_reader(step: Step, steps: list[Step], storage: dict[Node, str], is_result: bool) -> _FusedProduct:
    """Make the first step that reads a product its epilogue; if it cannot be, the epilogue stores the product."""
    product, how = step.product, _how(step)
    readers = [s for s in steps if product in map(base_of, (*s.inputs, *s.repair_inputs))]
    if readers:
        tail = readers[0]
        reason = _reason_against_tail(tail, product)
        if not reason:
            columns, alone, vectors = take_columns_out(tail, steps)
            first, rest, added = _cut_behind_first_stage(alone, product)
            added.update(vectors)
            reason = _reason_against_results(first, rest, {**storage, **added})
            if not reason:
                stored = is_result or len(readers) > 1 or (rest is not None and product in rest.inputs)
                how += ", the row program its epilogue"
                gemm = _with_epilogue(step, first, stored, {**storage, **added}, how)
                columns, rest = (None if s is None else with_bytes(s, {**storage, **added}) for s in (columns, rest))
                return _FusedProduct(step, gemm, tail, rest, columns, added)
        return _stored(step, storage, reason)
    return _stored(step, storage)


def _stored(step: Step, storage: dict[Node, str], reason: str = "") -> _FusedProduct:
    """Let the epilogue of a product store it, for a reason."""
    how = _how(step) + (f"; stored, as {reason}" if reason else "")
    store = replace(store_step(step.product), outputs=())
    return _FusedProduct(step, _with_epilogue(step, store, True, storage, how), None, None, None, {})


def _how(step: Step) -> str:
    """Say how our kernel computes a product: of splits what `choose_products` said."""
    return step.how if step.product.op == "split_matmul" else _HOW.format(step.product.dtype)


def _store_rounded(
    step: Step,
    steps: list[Step],
    storage: dict[Node, str],
    results: Collection[Node],
    layouts: dict[int, Layout],
    own: bool,
) -> list[_FusedProduct]:
    """List the ways to store a product rounded for the one step that reads it: by the library, and with `own` by ours.

    The library adds a bias that is an argument without gaps, of the product's dtype.
    """
    product = step.product
    readers = [s for s in steps if product in map(base_of, (*s.inputs, *s.repair_inputs))]
    if len(readers) != 1 or _reason_against_tail(readers[0], product):
        return []
    tail = readers[0]
    value = rounded_value(product, tail, results)
    if value is None:
        return []
    how, found = STORED_ROUNDED.format(product.dtype), []
    if value is product:
        added = {product: product.dtype}
        gemm, rest = (with_bytes(s, {**storage, **added}) for s in (step, tail))
        found.append(_FusedProduct(step, replace(gemm, choice=f"{step.how}; {how}"), tail, rest, None, added))
    kernels = [False] * own + [True] * (value is not product and can_add_bias(value, product, layouts))
    if kernels:
        columns, alone, vectors = take_columns_out(tail, steps)
        added = {**vectors, value: value.dtype}
        first, rest = cut_behind(value, alone, product)
        columns = None if columns is None else with_bytes(columns, {**storage, **added})
        rest = with_bytes(rest, {**storage, **added})
        end = f"{'' if value is product else ', its bias added'}; {how}"
        for by_library in kernels:
            kernel = step.how if by_library else _HOW.format(product.dtype)
            gemm = _with_epilogue(step, first, value is product, {**storage, **added}, kernel + end)
            found.append(_FusedProduct(step, replace(gemm, by_library=by_library), tail, rest, columns, added))
    return found


def _biased_by_library(
    step: Step, steps: list[Step], storage: dict[Node, str], results: Collection[Node], layouts: dict[int, Layout]
) -> _FusedProduct | None:
    """Let the library add the bias that is all that a product is read for; None where it is read for more."""
    product = step.product
    readers = [s for s in steps if product in map(base_of, (*s.inputs, *s.repair_inputs))]
    if len(readers) != 1 or product in results or _reason_against_tail(readers[0], product):
        return None
    (tail,) = readers
    value = bias_added(product, tail.nodes)
    alone = value is not None and tail.nodes == tail.outputs == (value,) and storage[value] == product.dtype
    if value is None or not alone or not can_add_bias(value, product, layouts):
        return None
    gemm = _with_epilogue(step, tail, False, storage, f"{step.how}, its bias added")
    return _FusedProduct(step, replace(gemm, by_library=True), tail, None, None, {})


def _with_epilogue(step: Step, epilogue: Step, stored: bool, storage: dict[Node, str], how: str) -> Step:
    """Return the step of a product with an epilogue, which also writes the product itself if that is `stored`."""
    product = step.product
    epilogue = replace(epilogue, outputs=(*epilogue.outputs, *([product] if stored else ())))
    others = [i for i in epilogue.inputs if i is not product and i not in step.inputs]
    nodes, inputs = [*step.nodes, *epilogue.nodes], [*step.inputs, *others]
    outputs = [*(n for n in step.outputs if n is not product), *epilogue.outputs]
    repairs = [i for i in dict.fromkeys((*step.repair_inputs, *epilogue.repair_inputs)) if i not in inputs]
    gemm = step_of("Gemm", product.shape, nodes, inputs, outputs, repairs)
    launches = step.launches + any(n.reduction for n in epilogue.nodes)
    return with_bytes(replace(gemm, launches=launches, epilogue=epilogue, choice=how), storage)


def _reason_against_tail(tail: Step, product: Node) -> str:
    """Explain why a step cannot be a product's epilogue, whole or in part; empty if it can."""
    if tail.kind not in ("RowProgram", "MatVec") or tail.domain != product.shape:
        return f"a {tail.kind} over {tail.domain[0]} x {tail.domain[1]} reads it"
    if any(base_of(i) is product and i is not product for i in (*tail.inputs, *tail.repair_inputs)):
        return "a view of it is read"
    if any(n.op == "guard" and n.inputs[1].reduction for n in tail.nodes):
        return "sums of its rows may have to be repaired"
    stages = stages_of(tail)
    if any(n.op == "guard" and stages[n] > 0 for n in tail.nodes):
        return "a later stage has guarded values"
    return ""


def _reason_against_results(first: Step, rest: Step | None, storage: dict[Node, str]) -> str:
    """Explain why our kernel cannot write the results of a stage, which `rest` reads; empty if it can."""
    full = [n for n in first.outputs if n.shape == first.domain]
    sizes = [dtypes.ITEMSIZE[storage[n]] for n in full]
    if rest is not None and any(n in rest.inputs and storage[n] != dtypes.compute_dtype(n.dtype) for n in full):
        # Reductions of the unrounded values would not belong to the rounded ones.
        return "a result is read again, but rounded"
    if any(size not in (2, 4) for size in sizes):
        return "results of 1 or 8 bytes an element follow"
    if sum(sizes) > MOST_STAGED - dtypes.ITEMSIZE["float32"]:  # with the product itself
        return f"{len(full)} results of its size follow"
    if len(full) < len(first.outputs) and not any(n.reduction for n in first.nodes):
        return "values of rows are computed without it"
    return ""


def _cut_behind_first_stage(tail: Step, product: Node) -> tuple[Step, Step | None, dict[Node, str]]:
    """Cut a row program in two: return its first stage, the rest, and the dtypes of the values stored in between."""
    stages = stages_of(tail)
    later = [n for n in tail.nodes if stages[n] > 0]
    if not later:
        return tail, None, {}
    # Values of stage -1, which depend on no element of the rows, are computed in both.
    again = _needed(later, [n for n in tail.nodes if stages[n] < 0])
    read_later = dict.fromkeys(i for n in (*again, *later) for i in g.eager_inputs(n))
    between = [n for n in tail.nodes if stages[n] == 0 and n in read_later]
    own_outputs = [o for o in tail.outputs if stages.get(o, 0) <= 0 and o not in between]
    first = _first_stage(tail, product, [n for n in tail.nodes if stages[n] <= 0], [*between, *own_outputs])
    inputs = [*between, *(i for i in tail.inputs if i in read_later)]
    outputs = [o for o in tail.outputs if stages.get(o, 0) > 0]
    rest = step_of("RowProgram", tail.domain, [*again, *later], inputs, outputs, [])
    return first, rest, {n: dtypes.compute_dtype(n.dtype) for n in between if n not in tail.outputs}


def _first_stage(tail: Step, product: Node, nodes: list[Node], outputs: list[Node]) -> Step:
    """Return the row program that computes `outputs`, by those of a tail's `nodes` that they need."""
    nodes = _needed(outputs, nodes)
    guarded = (n.inputs[1] for n in nodes if n.op == "guard")
    read = set(g.topological(guarded, lambda n: () if n in tail.inputs else n.inputs))
    read.update(i for n in nodes for i in g.eager_inputs(n))
    inputs = [i for i in tail.inputs if i is product or i in read]
    return step_of("RowProgram", tail.domain, nodes, inputs, outputs, list(tail.repair_inputs))


def _needed(roots: Sequence[Node], nodes: Sequence[Node]) -> list[Node]:
    """Return those of the nodes that the roots are computed from, the roots among them."""
    reached = set(g.topological(roots, g.eager_inputs))
    return [n for n in nodes if n in reached]
