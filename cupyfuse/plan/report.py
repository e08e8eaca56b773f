"""Reports: plans as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import devices
from .schedule import Step

Plan = Any  # `plan.Plan`, which imports this module


def quantity(value: float, unit: str) -> str:
    """Format a number with a decimal prefix, as in '33.6 MB'."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def report(plan: Plan) -> str:
    """Describe the steps of a plan, its rewrites, and its cost beside that of the unfused operations."""
    inputs = ", ".join(f"{n.name} {n.shape[0]} x {n.shape[1]} {n.dtype}" for n in plan.graph.inputs if n.name)
    lines = [f"plan of {plan.name}({inputs}), precision {plan.precision}", ""]
    lines += _table(plan.steps)
    lines += _memory(plan)
    if plan.prepare is not None:
        kept = quantity(sum(o.node.nbytes for o in plan.prepare.outputs), "B")
        lines += ["", f"prepacked {plan.prepare_note.format(kept)}"]
        lines += _table(plan.prepare.steps)
    if plan.notes:
        lines += ["", "rewritten:"]
        merged: dict[tuple[str, str, str], int] = {}
        for note in plan.notes:
            key = (note.identity, note.what, note.saved)
            merged[key] = merged.get(key, 0) + 1
        for (identity, what, saved), times in merged.items():
            lines.append(f"  - {identity}:")
            lines.append(
                f"      {what}{f' ({times} times)' if times > 1 else ''}; saves {saved}{' each' * (times > 1)}"
            )
    guards = [n for step in plan.steps for n in step.nodes if n.op == "guard"]
    if guards:
        lines.append("  - guarded: what comes out infinite or NaN is evaluated as written, on the device")
    lines += ["", *_totals(plan)]
    return "\n".join(lines)


def _table(steps: Sequence[Step]) -> list[str]:
    lines = []
    for number, step in enumerate(steps, 1):
        cost = f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}, {quantity(step.flops, 'FLOP')}"
        if step.kind == "Library":
            moved = f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}"
            lines.append(f"  {number}. Library {step.fused[0]}: {moved}; the library's own function, not fused")
            continue
        launches = f"{step.launches} launch" + ("es" if step.launches != 1 else "")
        lines.append(f"  {number}. {step.kind} over {step.domain[0]} x {step.domain[1]}: {launches}; {cost}")
        lines.append(f"     fused: {', '.join(step.fused)}")
        lines += [f"     by:    {step.how}"] * bool(step.how)
    return lines or ["  nothing to compute"]


def _memory(plan: Plan) -> list[str]:
    """Report the workspace of a call, if its bound decided how the plan runs."""
    most = quantity(plan.settings.max_workspace, "B")
    if plan.blocks is not None:
        b = plan.blocks
        shared = f"; {len(b.common.steps)} for all blocks first" if b.common else ""
        return [
            "",
            f"the steps run for {b.count} blocks of {b.rows} rows, one after the other{shared}: "
            f"{quantity(plan.workspace, 'B')} of",
            f"workspace, where all rows at once would take more than the {most} of max_workspace",
        ]
    if plan.whole:
        workspace = quantity(plan.workspace, "B")
        return ["", f"{workspace} of workspace, more than the {most} of max_workspace: not in blocks, as {plan.whole}"]
    return []


def _totals(plan: Plan) -> list[str]:
    moved = plan.reads + plan.writes
    device = devices.DEFAULT
    lines = [
        f"fused:   {plan.launches} launch{'es' * (plan.launches != 1)}, {quantity(moved, 'B')} moved, "
        f"{quantity(plan.flops, 'FLOP')}; "
        f"at best {plan.best_time(device) * 1e6:.3g} us on an {device}"
    ]
    if plan.calls:
        unfused = sum(c.reads + c.writes for c in plan.calls)
        work = sum(c.flops for c in plan.calls)
        names = ", ".join(c.name for c in plan.calls)
        lines.append(
            f"unfused: {len(plan.calls)} operations ({names}), {quantity(unfused, 'B')} moved, {quantity(work, 'FLOP')}"
        )
    return lines
