"""Emit the totals of a stage: its accumulators, how elements are added to them, and how reductions read them."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.graph import Node
from ..ir.operators import REDUCTIONS
from ..plan.schedule import Step, state_size
from .accumulators import Accumulator
from .c_types import c_type


def totals_struct(
    stage: int, accumulators: list[Accumulator], field: Callable[[Node, str], str], terms: dict[Node, str | None]
) -> str:
    """Emit the struct of a stage's accumulators, which act together, and the functions that feed it elements.

    Templates call `peek` for each element of a tile, `settle` once, then `add` for each pack of V elements, with
    the first one's position along the reduced axis; where all elements are peeked before any is added, `start` in the
    place of `settle`. Lanes of a warp combine by `lead`, `settle` and `exchange`. `merge` adds the totals of others,
    totals of many others with what roundings make their sums too large in `excess` (see `reductions.cuh`).

    Parameters
    ----------
    stage : int
    accumulators : list of Accumulator
    field : callable
        Returns the expression of a value that an Element, named by its second argument, holds.
    terms : dict
        For values that an Element holds and that are terms of the accumulators, the expressions that compute them from
        a `distance` to the maximum of the row; None for those that the accumulator computes, of shares.
    """
    lines = [f"struct Totals{stage} {{"]
    lines += [f"    {a.kind} {a.name};" for a in accumulators]
    lead = " ".join(f"{a.name}.lead(mask, members);" for a in accumulators)
    settle = " ".join(f"{a.name}.settle(always);" for a in accumulators)
    start = " ".join(f"{a.name}.start();" for a in accumulators)
    merge = " ".join(f"{a.name}.merge(o.{a.name});" for a in accumulators)
    merge_next = " ".join(f"merge_next({a.name}, o.{a.name}, excess.{a.name});" for a in accumulators)
    exchange = " ".join(f"{a.name}.exchange(mask, upper, members);" for a in accumulators)
    sums_alone = all(a.kind in ("Sum<float>", "Sum<double>") for a in accumulators)
    lines.append(f"    static constexpr bool sums_alone = {'true' if sums_alone else 'false'};")
    lines.append(f"    __device__ void lead(int mask, u32 members) {{ {lead} }}")
    lines.append(f"    __device__ void settle(bool always = false) {{ {settle} }}")
    lines.append(f"    __device__ void start() {{ {start} }}")
    lines.append(f"    __device__ void merge(const Totals{stage}& o) {{ {merge} }}")
    lines.append(f"    __device__ void merge(const Totals{stage}& o, Totals{stage}& excess) {{ {merge_next} }}")
    lines.append(f"    __device__ void exchange(int mask, bool upper, u32 members) {{ {exchange} }}")
    lines.append("};")
    lines.append(f"__device__ Totals{stage} totals(At<{stage}>) const {{ return Totals{stage}(); }}")
    peek = " ".join(f"t.{a.name}.peek({field(a.operand, 'e')});" for a in accumulators)
    lines.append(f"__device__ void peek(At<{stage}>, const Element& e, Totals{stage}& t) const {{ {peek} }}")
    lines.append("template <int V>")
    lines.append(f"__device__ void add(At<{stage}>, Element* e, i64 at, Totals{stage}& t) const {{")
    for a in accumulators:
        operand, kind = field(a.operand, "e[j]"), c_type(a.operand.dtype)
        lines.append(f"    {kind} of_{a.name}[V];")
        lines.append(f"    for (int j = 0; j < V; ++j) of_{a.name}[j] = {operand};")
        if a.term is None or a.term not in terms:
            lines.append(f"    add_pack(t.{a.name}, of_{a.name}, at);")
            continue
        expression = terms[a.term]
        lines.append("    for (int j = 0; j < V; ++j) {")
        if expression is None:
            expression = f"t.{a.name}.term(of_{a.name}[j])"
        else:
            lines.append(f"        const {kind} distance = of_{a.name}[j] - t.{a.name}.extreme();")
        lines.append(f"        of_{a.name}[j] = {field(a.term, 'e[j]')} = {expression};")
        lines += ["    }", f"    add_terms(t.{a.name}, of_{a.name});"]
    lines.append("}")
    return "\n".join(lines)


def read_totals(accumulators: list[Accumulator]) -> dict[Node, str]:
    """Return the expressions that read reductions from the totals."""
    return {n: f"t.{a.name}.{REDUCTIONS[n.op].read}" for a in accumulators for n in a.readers}


def check_of_states(step: Step, number: int = 0) -> str:
    """Emit the check that the totals of a step fit into the memory that a launch allocates for them.

    The step has one stage; `number` is that of its totals.
    """
    return f'static_assert(sizeof(Program::Totals{number}) <= {state_size(step)}, "what a launch allocates");'
