"""Products by our own kernels, with the row program behind one of them as its epilogue.

In the kernel of 16-bit products (`kernels_cu/gemm.cu`), which also multiplies splits in one part where `products.py`
chose it for them, the row program reads the product from registers. Pointwise results are written at once. Reductions
leave a state for each row and tile, which a second kernel merges: the product itself is not written, unless another
step reads it. A row program of several stages is cut in two: the kernel runs the first stage and writes what the others
read. One whose parts share nothing, such as the biases of three products, is taken apart first. Values of columns
alone, which it would compute for every row, are a step of their own before it. Or the product is stored rounded, with
its bias, for a row program behind it (`rounded.py`): by our kernel, or by the library.

The kernels of products from splits in two parts (`kernels_cu/split_gemm.cu`, `split_repair.cu`) take pointwise row
programs alone: an element that has to be repaired would be part of a reduction already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from ...ir.products import strip_transposes
from ...settings import Settings
from ..rounding import bias_added, is_16_bit_product
from .columns import take_columns_out
from .fused_product import GAIN, FusedProduct, between, is_needed_before, with_epilogue
from .memory import Layout, base_of
from .padding import can_be_padded, operands_to_pad, unaligned_operands
from .repeats import reads_repeats
from .rounded import STORED_ROUNDED, WORTH, cut_behind, rounded_value
from .steps import Step, parts_by_product, stages_of, step_of, with_bytes
from .tiles import LINE, MOST_STAGED, takes_epilogues

_HOW = "own {} product with float32 sums"
_MOST_MATRICES = 2  # besides the product, that the epilogue of a split product reads: their elements take registers


def store_step(product: Node) -> Step:
    """Return the epilogue that stores a product."""
    return step_of("RowProgram", product.shape, [], [product], [product], [])


def fuse_epilogues(
    steps: Sequence[Step],
    storage: dict[Node, str],
    padded: set[Node],
    results: Collection[Node],
    layouts: dict[int, Layout],
    settings: Settings,
) -> list[Step]:
    """Give 16-bit products to our kernel, and row programs to our kernels as epilogues, where that is faster.

    A large 16-bit product may be stored rounded instead, by our kernel or by the library; a bias that is all that
    follows may be the library's to add. Products from splits in one part are our kernel's already, unless they are
    `unscaled`: only their epilogue is to be decided.

    Parameters
    ----------
    steps : sequence of Step
    storage : dict
        The dtype in which each value is stored; a step that is cut in two adds what its first part writes.
    padded : set of Node
        Values whose rows are padded; operands of our kernel are added where all of their readers take any stride.
    results : collection of Node
        Values that are read after the last step.
    layouts : dict
        Memory layouts of the arguments.
    settings : Settings
    """
    found, device = list(steps), settings.device
    if device is None or settings.epilogues == "never":
        return found
    whole: dict[Step, list[Step]] = {}
    if takes_epilogues(settings):
        whole = _taken_apart(found, storage)
        found = [part for step in found for part in whole.get(step, [step])]
    for step in steps:
        if step.kind != "Gemm":
            continue
        product, fused = step.product, None
        if product.op == "split_matmul" and product.parts == 2:
            fused = _fuse_pointwise_reader(step, found, storage, product in results)
            if fused is not None and settings.epilogues == "measured" and not fused.is_worth_splitting(device):
                fused = None
        elif is_16_bit_product(product) and takes_epilogues(settings):
            fused, reason = _choose(step, found, storage, results, layouts, settings)
            if fused is not None and fused.gemm.by_tiles:
                padded.update(m for m in operands_to_pad(product) if can_be_padded(m, found, results))
            if fused is None:
                found[found.index(step)] = replace(step, choice=f"{step.how}, rather than our own kernel: {reason}")
        elif product.op == "split_matmul" and not product.unscaled:
            fused = _fuse_first_reader(step, found, storage, product in results)
            if settings.epilogues == "measured":
                fused = _stored_if_faster(fused, storage, device)
        if fused is not None:
            storage.update(fused.storage)
            found = fused.replace_in(found)
    return _put_together(found, whole)


def _taken_apart(steps: Sequence[Step], storage: dict[Node, str]) -> dict[Step, list[Step]]:
    """Take row programs apart whose parts read 16-bit products of their own: each may be an epilogue."""
    products = {s.product for s in steps if s.kind == "Gemm" and is_16_bit_product(s.product)}
    found: dict[Step, list[Step]] = {}
    for step in steps:
        parts = parts_by_product(step, products)
        if len(parts) > 1:
            found[step] = [with_bytes(part, storage) for part in parts]
    return found


def _put_together(steps: list[Step], whole: dict[Step, list[Step]]) -> list[Step]:
    """Put row programs together again none of whose parts became an epilogue: one launch does."""
    for step, parts in whole.items():
        if all(part in steps for part in parts):
            last = max(map(steps.index, parts))
            steps = [step if k == last else s for k, s in enumerate(steps) if k == last or s not in parts]
    return steps


def _choose(
    step: Step,
    steps: list[Step],
    storage: dict[Node, str],
    results: Collection[Node],
    layouts: dict[int, Layout],
    settings: Settings,
) -> tuple[FusedProduct | None, str]:
    """Choose how a 16-bit product and what reads it are computed: by our kernel if that may be, or the fastest way.

    None leaves both as they are, and the second result says why.
    """
    device, best = settings.device, None
    assert device is not None
    reason = _reason_against_product(step.product, steps, results, layouts)
    own = None if reason else _fuse_first_reader(step, steps, storage, step.product in results)
    if settings.epilogues != "measured":
        return own, reason
    if own is not None:
        own = _stored_if_faster(own, storage, device)
        reason = own.reason_for_library(device)
        best = None if reason else own
    # A product with nothing but a bias behind it is not stored for another step: at most one of the two is there.
    rounded = _store_rounded(step, steps, storage, results, layouts, own=own is not None)
    biased = _bias_by_library(step, steps, storage, results, layouts)
    # A sum that is stored for a backward pass is rounded anyway: to read it so costs no accuracy that has a price.
    worth = GAIN if any(n in results for form in rounded for n in form.storage) else WORTH
    for others, gain in ((rounded, worth), (biased, GAIN)):
        for other in sorted(others, key=lambda form: form.seconds(device))[:1]:
            usual = other.library_seconds(device) if best is None else best.seconds(device)
            if other.seconds(device) < gain * min(usual, other.library_seconds(device)):
                best, reason = other, ""
    return best, reason


def _reason_against_product(
    product: Node, steps: Sequence[Step], results: Collection[Node], layouts: dict[int, Layout]
) -> str:
    """Explain why our kernel cannot compute a 16-bit product; empty if it can."""
    if 0 in product.shape or product.inputs[0].shape[1] == 0:
        return "the product is empty"
    for operand in product.inputs:
        matrix, _ = strip_transposes(operand)
        layout = layouts.get(matrix.argument) if matrix.op == "input" else None
        if matrix.op == "slice" or (layout is not None and not layout.contiguous):
            return "an operand is not contiguous"
        if max(matrix.shape) >= 1 << 31:
            return "an operand is longer than the TMA counts"
    for matrix in unaligned_operands(product):
        if not can_be_padded(matrix, steps, results):
            return f"rows of {matrix.shape[1]} elements do not begin at multiples of 16 bytes, as the TMA asks"
    return ""


def _fuse_pointwise_reader(
    step: Step, steps: list[Step], storage: dict[Node, str], is_result: bool
) -> FusedProduct | None:
    """Make the first step that reads a split product its epilogue; None if it cannot be."""
    product = step.product
    readers = _readers_of(product, steps)
    if not readers or _reason_against_tail(readers[0], step, steps) or not _is_pointwise(readers[0]):
        return None
    columns, tail, vectors = take_columns_out(readers[0], steps)
    how = f"{step.how}; the row program its epilogue"
    gemm = with_epilogue(step, tail, is_result or len(readers) > 1, {**storage, **vectors}, how)
    columns = None if columns is None else with_bytes(columns, {**storage, **vectors})
    return FusedProduct(step, gemm, readers[0], None, columns, vectors)


def _readers_of(product: Node, steps: Iterable[Step]) -> list[Step]:
    """Return the steps that read a product, or a view of it."""
    return [s for s in steps if product in map(base_of, (*s.inputs, *s.repair_inputs))]


def _only_tail(step: Step, steps: list[Step]) -> Step | None:
    """Return the one step that reads a product, if that may be its epilogue, whole or in part."""
    readers = _readers_of(step.product, steps)
    return readers[0] if len(readers) == 1 and not _reason_against_tail(readers[0], step, steps) else None


def _is_pointwise(tail: Step) -> bool:
    """Whether a row program computes each element of its results from the same element of few matrices."""
    plain = not any(n.reduction for n in tail.nodes) and all(n.shape == tail.domain for n in tail.outputs)
    return plain and sum(n.shape == tail.domain for n in tail.inputs) <= 1 + _MOST_MATRICES


def _fuse_first_reader(step: Step, steps: list[Step], storage: dict[Node, str], is_result: bool) -> FusedProduct:
    """Make the first step that reads a product its epilogue; if it cannot be, the epilogue stores the product."""
    product, how = step.product, _how(step)
    readers = _readers_of(product, steps)
    if readers:
        tail = readers[0]
        reason = _reason_against_tail(tail, step, steps)
        if not reason:
            columns, alone, vectors = take_columns_out(tail, steps)
            first, rest, added = _cut_behind_first_stage(alone, product)
            added.update(vectors)
            reason = _reason_against_results(first, rest, {**storage, **added})
            if not reason:
                stored = is_result or len(readers) > 1 or (rest is not None and product in rest.inputs)
                how += ", the row program its epilogue"
                gemm = with_epilogue(step, first, stored, {**storage, **added}, how)
                columns, rest = (None if s is None else with_bytes(s, {**storage, **added}) for s in (columns, rest))
                return FusedProduct(step, gemm, tail, rest, columns, added)
        return _stored(step, storage, reason)
    return _stored(step, storage)


def _stored(step: Step, storage: dict[Node, str], reason: str = "") -> FusedProduct:
    """Let the epilogue of a product store it, for a reason."""
    how = _how(step) + (f"; stored, as {reason}" if reason else "")
    store = replace(store_step(step.product), outputs=())
    return FusedProduct(step, with_epilogue(step, store, True, storage, how), None, None, None, {})


def _stored_if_faster(fused: FusedProduct, storage: dict[Node, str], device: Device) -> FusedProduct:
    """Let our kernel store a product if the row program behind it is faster alone than as its epilogue."""
    if fused.tail is None:
        return fused
    stored = _stored(fused.plain, storage, "the row program is faster alone")
    stored = replace(stored, tail=fused.tail, rest=fused.tail)
    return stored if stored.seconds(device) < fused.seconds(device) else fused


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
) -> list[FusedProduct]:
    """List the ways to store a product rounded for the one step that reads it, with `own` by our kernel too."""
    product, tail = step.product, _only_tail(step, steps)
    value = None if tail is None else rounded_value(product, tail, results, storage)
    if tail is None or value is None:
        return []
    how, found = STORED_ROUNDED.format(product.dtype), []
    if value is product:
        added = {product: product.dtype}
        gemm, rest = (with_bytes(s, {**storage, **added}) for s in (step, tail))
        found.append(FusedProduct(step, replace(gemm, choice=f"{step.how}; {how}"), tail, rest, None, added))
    by_library = value is not product and _library_adds_bias(value, product, layouts)
    if own or by_library:
        columns, alone, vectors = take_columns_out(tail, steps)
        added = {**vectors, value: value.dtype}
        first, rest = cut_behind(value, alone, product)
        columns = None if columns is None else with_bytes(columns, {**storage, **added})
        rest = with_bytes(rest, {**storage, **added})
        end = f"{'' if value is product else ', its bias added'}; {how}"
        gemm = with_epilogue(step, first, value is product, {**storage, **added}, _HOW.format(product.dtype) + end)
        if own:
            found.append(FusedProduct(step, gemm, tail, rest, columns, added))
        if by_library:
            gemm = replace(gemm, by_library=True, choice=step.how + end)
            found.append(FusedProduct(step, gemm, tail, rest, columns, added))
    return found


def _bias_by_library(
    step: Step, steps: list[Step], storage: dict[Node, str], results: Collection[Node], layouts: dict[int, Layout]
) -> list[FusedProduct]:
    """Let the library add a bias, if that is all that a product is read for."""
    product, tail = step.product, _only_tail(step, steps)
    value = None if tail is None or product in results else bias_added(product, tail.nodes)
    if tail is None or value is None or not _library_adds_bias(value, product, layouts):
        return []
    if not tail.nodes == tail.outputs == (value,) or storage[value] != product.dtype:
        return []
    gemm = with_epilogue(step, tail, False, storage, f"{step.how}, its bias added")
    return [FusedProduct(step, replace(gemm, by_library=True), tail, None, None, {})]


def _library_adds_bias(value: Node, product: Node, layouts: dict[int, Layout]) -> bool:
    """Whether cuBLASLt may add the bias in the sum of a product and a bias.

    The bias has to be an argument without gaps, of the product's dtype and width: no step need be before this one. Rows
    of the result have to begin at multiples of 16 bytes: 4097 x 1000 x 1001 in bfloat16 takes our kernel 63 us on an
    H200, and cuBLASLt 91.
    """
    (bias,) = (i for i in value.inputs if i is not product)
    if bias.op != "input" or bias.dtype != product.dtype or bias.shape[1] != product.shape[1]:
        return False
    if 0 in (*product.shape, product.inputs[0].shape[1]) or product.shape[1] % LINE:
        return False
    layout = layouts.get(bias.argument)
    return layout is None or layout.contiguous


def _reason_against_tail(tail: Step, step: Step, steps: list[Step]) -> str:
    """Explain why a step cannot be the epilogue of a product's, whole or in part; empty if it can."""
    product = step.product
    if tail.kind not in ("RowProgram", "MatVec") or tail.domain != product.shape:
        return f"a {tail.kind} over {tail.domain[0]} x {tail.domain[1]} reads it"
    if any(base_of(i) is product and i is not product for i in (*tail.inputs, *tail.repair_inputs)):
        return "a view of it is read"
    if reads_repeats(tail):
        return "rows that come again are read with it"
    if any(n.op == "guard" and n.inputs[1].reduction for n in tail.nodes):
        return "sums of its rows may have to be repaired"
    stages = stages_of(tail)
    if any(n.op == "guard" and stages[n] > 0 for n in tail.nodes):
        return "a later stage has guarded values"
    if is_needed_before(tail, step, steps):
        written = {n for s in between(tail, step, steps) for n in s.outputs}
        if any(base_of(i) in written for i in (*tail.inputs, *tail.repair_inputs)):
            return "what reads it follows steps that need the split of its operand"
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
