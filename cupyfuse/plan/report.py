"""Reports: plans as text, and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import devices
from ..rewrite import Note
from .schedule import Step

Plan = Any  # `plan.Plan`, which imports this module


def quantity(value: float, unit: str) -> str:
    """Format a number with a decimal prefix, as in '33.6 MB'."""
    value = float(f"{value:.3g}")  # 999.9 kB is 1 MB
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Format a time with its unit, as in '7 us'."""
    seconds = float(f"{seconds:.3g}")
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def report(plan: Plan) -> str:
    """Describe the steps of a plan, its rewrites, and its cost beside that of the unfused operations."""
    return "\n".join([*_step_lines(plan), *_rewrite_lines(plan), "", *totals(plan)])


def report_of_steps(plan: Plan) -> str:
    """Describe the steps of a plan and its cost, without the rewrites."""
    return "\n".join([*_step_lines(plan), "", *totals(plan)])


def heading(plan: Plan) -> str:
    """Name a plan's function, its arguments with their shapes and dtypes, and the precision."""
    inputs = ", ".join(f"{n.name} {n.shape[0]} x {n.shape[1]} {n.dtype}" for n in plan.graph.inputs if n.name)
    return f"plan of {plan.name}({inputs}), precision {plan.precision}"


def prepacked_heading(plan: Plan) -> str:
    """Say when a plan's prepacked values are computed, and how much memory they take."""
    kept = quantity(sum(o.node.nbytes for o in plan.prepare.outputs), "B")
    return f"prepacked {plan.prepare_note.format(kept)}"


def _step_lines(plan: Plan) -> list[str]:
    """List the heading, the steps, the workspace and what is prepacked."""
    lines = [heading(plan), "", *_table(plan.steps)]
    if plan.as_written:
        lines += ["", f"on the CPU the function runs as written: {plan.as_written}"]
    if memory := workspace_lines(plan):
        lines += ["", *memory]
    if plan.prepare is not None:
        lines += ["", prepacked_heading(plan), *_table(plan.prepare.steps)]
    return lines


def merged_notes(plan: Plan) -> dict[Note, int]:
    """Count how often each rewrite was applied, in the order of its first use."""
    merged: dict[Note, int] = {}
    for note in plan.notes:
        merged[note] = merged.get(note, 0) + 1
    return merged


def _rewrite_lines(plan: Plan) -> list[str]:
    """List the rewrites that were applied, and whether values are guarded."""
    lines = ["", "rewritten:"] if plan.notes else []
    for note, times in merged_notes(plan).items():
        lines.append(f"  - {note.identity}:")
        repeated = f" ({times} times)" if times > 1 else ""
        lines.append(f"      {note.what}{repeated}; saves {note.saved}{' each' * (times > 1)}")
    guards = [n for step in plan.steps for n in step.nodes if n.op == "guard"]
    if guards:
        lines.append("  - guarded: what comes out infinite or NaN is evaluated as written, on the device")
    return lines


def cost(step: Step) -> str:
    """Describe the launches, bytes and arithmetic of a step."""
    launches = f"{step.launches} launch" + ("es" if step.launches != 1 else "")
    moved = f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}"
    return f"{launches}; {moved}, {quantity(step.flops, 'FLOP')}"


def _table(steps: Sequence[Step]) -> list[str]:
    """List steps with their costs, operators and ways of computing."""
    lines = []
    for number, step in enumerate(steps, 1):
        if step.kind == "Library":
            moved = f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}"
            lines.append(f"  {number}. Library {step.fused[0]}: {moved}; the library's own function, not fused")
            continue
        lines.append(f"  {number}. {step.kind} over {step.domain[0]} x {step.domain[1]}: {cost(step)}")
        lines.append(f"     fused: {', '.join(step.fused)}")
        lines += [f"     by:    {step.how}"] * bool(step.how)
    return lines or ["  nothing to compute"]


def workspace_lines(plan: Plan) -> list[str]:
    """Report the workspace of a call, where `max_workspace` decided how the plan runs."""
    return [*_blocks_lines(plan), *([f"for the backward pass: {plan.saving}"] if plan.saving else [])]


def _blocks_lines(plan: Plan) -> list[str]:
    """Report the blocks in which a plan runs, or why it runs in none although it exceeds the limit."""
    most = quantity(plan.settings.max_workspace, "B")
    if plan.blocks is not None:
        b = plan.blocks
        first, after = (sum(len(p.steps) for p in plans) for plans in (b.first, [b.after] if b.after else []))
        shared = f"; {first} for all blocks first" if first else ""
        shared += f"; {after} after them" if after else ""
        return [
            f"the steps run for {b.count} blocks of {b.rows} {b.unit}, one after the other{shared}: "
            f"{quantity(plan.workspace, 'B')} of",
            f"workspace, where all {b.unit} at once would take more than the {most} of max_workspace",
            *([b.choice] if b.choice else []),
        ]
    if plan.whole:
        workspace = quantity(plan.workspace, "B")
        return [f"{workspace} of workspace, more than the {most} of max_workspace: not in blocks, as {plan.whole}"]
    return []


def totals(plan: Plan, gpu: str = devices.DEFAULT) -> list[str]:
    """Sum up a plan in a line, and the operations as written in another."""
    moved = plan.reads + plan.writes
    lines = [
        f"fused:   {plan.launches} launch{'es' * (plan.launches != 1)}, {quantity(moved, 'B')} moved, "
        f"{quantity(plan.flops, 'FLOP')}; "
        f"at best {duration(plan.best_time(gpu))} on {devices.find(gpu).with_article}"
    ]
    if plan.calls:
        unfused = sum(c.reads + c.writes for c in plan.calls)
        work = sum(c.flops for c in plan.calls)
        names = ", ".join(c.name for c in plan.calls)
        lines.append(
            f"unfused: {len(plan.calls)} operations ({names}), {quantity(unfused, 'B')} moved, {quantity(work, 'FLOP')}"
        )
    return lines


def record(plan: Plan, gpu: str = devices.DEFAULT) -> dict[str, Any]:
    """Describe a plan as numbers, strings, lists and dicts; see `Plan.record`."""
    device = devices.find(gpu)
    arguments = [{"name": n.name, "shape": list(n.shape), "dtype": n.dtype} for n in plan.graph.inputs if n.name]
    steps = [
        {
            "kind": step.kind,
            "domain": list(step.domain),
            "fused": list(step.fused),
            "how": step.how,
            "launches": step.launches,
            "reads": step.reads,
            "writes": step.writes,
            "flops": step.flops,
            "best_seconds": max(plan.step_times(step, device)),
        }
        for step in plan.steps
    ]
    notes = [
        {"identity": note.identity, "what": note.what, "saved": note.saved, "times": times}
        for note, times in merged_notes(plan).items()
    ]
    blocks = plan.blocks and {
        "count": plan.blocks.count,
        plan.blocks.unit: plan.blocks.rows,
        "choice": plan.blocks.choice,
    }
    return {
        "name": plan.name,
        "precision": plan.precision,
        "gpu": device.name,
        "arguments": arguments,
        "results": [{"shape": list(o.shape), "dtype": o.dtype} for o in plan.outputs],
        "steps": steps,
        "blocks": blocks,
        "saving": plan.saving,
        "as_written": plan.as_written,
        "launches": plan.launches,
        "reads": plan.reads,
        "writes": plan.writes,
        "flops": plan.flops,
        "workspace": plan.workspace,
        "best_seconds": plan.best_time(gpu),
        "unfused": [{"name": c.name, "reads": c.reads, "writes": c.writes, "flops": c.flops} for c in plan.calls],
        "rewritten": notes,
        "prepacked": None if plan.prepare is None else record(plan.prepare, gpu),
    }
