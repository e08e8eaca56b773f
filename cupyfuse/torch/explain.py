"""What was fused of a module, and why the rest was not, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..plan import Plan

_WIDTH = 100  # of a chain's operations in the table


@dataclass(frozen=True)
class Part:
    """One chain, or one operation that was left to PyTorch.

    Attributes
    ----------
    module : path of the module in which it is
    operations : names of its operations
    plans : of a chain, one for each combination of shapes that ran; empty for what is not fused
    reason : why it is not fused; empty for a chain
    estimate : of a chain, the costs that were expected
    """

    module: str
    operations: tuple[str, ...]
    plans: tuple[Plan, ...] = ()
    reason: str = ""
    estimate: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain()` returns; print it for a table, or `details()` for every plan.

    Attributes
    ----------
    fused : tuple of Part
        The chains that run through cupyfuse.
    left : tuple of Part
        What runs as PyTorch runs it, and why.
    """

    fused: tuple[Part, ...]
    left: tuple[Part, ...]

    def __str__(self) -> str:
        if not self.fused and not self.left:
            return "nothing has run yet: call the module, then ask again"
        lines = [f"{len(self.fused)} chains fused, {len(self.left)} operations left to PyTorch"]
        if self.fused:
            lines += ["", "  fused"]
            rows: dict[str, list[Part]] = {}
            for part in self.fused:
                rows.setdefault(_shortened(part.operations), []).append(part)
            for text, parts in sorted(rows.items(), key=lambda each: -len(each[1])):
                lines.append(f"{len(parts):6d} × {text}")
                lines.append(f"           in {parts[0].module or 'the module'}{_costs(parts)}")
        if self.left:
            lines += ["", "  left to PyTorch"]
            reasons: dict[str, Counter[str]] = {}
            for part in self.left:
                reasons.setdefault(part.reason, Counter())["/".join(part.operations) or "its own code"] += 1
            for reason, names in sorted(reasons.items(), key=lambda each: -each[1].total()):
                shown = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in names.most_common(4))
                more = f", {len(names) - 4} more" if len(names) > 4 else ""
                lines.append(f"{names.total():6d}   {shown}{more}: {reason}")
        return "\n".join(lines)

    def details(self) -> str:
        """Every chain with its plans, and every operation that was left."""
        lines = []
        for part in self.fused:
            lines.append(f"fused in {part.module or 'the module'}: {' -> '.join(part.operations)}")
            for plan in part.plans:
                lines += ["  " + line for line in str(plan).splitlines()]
        for part in self.left:
            where = part.module or "the module"
            lines.append(f"left to PyTorch in {where}: {', '.join(part.operations) or 'its own code'}: {part.reason}")
        return "\n".join(lines)


def _costs(parts: list[Part]) -> str:
    """The launches of a chain that occurs several times, and what it was expected to cost."""
    launches = sorted({plan.launches for part in parts for plan in part.plans})
    counted = f"; {' or '.join(map(str, launches))} launches" if launches else ""
    estimates = list(dict.fromkeys(part.estimate for part in parts if part.estimate))
    return counted + (f"; {estimates[0]}" if estimates else "")


def _shortened(operations: tuple[str, ...]) -> str:
    text = " -> ".join(operations)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 12]} ... -> {operations[-1]}"


def explain(module: Any) -> Explanation:
    """Explain what was captured of a fused module, and of drop-in modules within it."""
    fused: list[Part] = []
    left: dict[Any, Part] = {}
    for path, part in module.named_modules():
        captured = part.__dict__.get("_cupyfuse")
        if captured is None:
            continue
        for found in captured.parts(path):
            if not found.reason:
                fused.append(found)
            else:
                left.setdefault((found.module, found.operations, found.reason, len(left) if path == "" else 0), found)
    return Explanation(tuple(fused), tuple(left.values()))


def refusals(path: str, runners: Iterable[Any]) -> list[Part]:
    """The reasons for which chains ran as PyTorch runs them, though they were to be fused."""
    return [Part(path, r.chain.operations, (), reason) for r in runners for reason in r.refusals]
