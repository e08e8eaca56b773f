"""Explain what was fused of a module, and why the rest was not."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..plan.plan import Plan

_WIDTH = 100  # of a chain's operations
_LINE = 120  # of the reasons' table
_ROWS = 12  # of each table
VIEW = "a view costs nothing"


@dataclass(frozen=True)
class Part:
    """One chain, or one operation that was left to PyTorch.

    Attributes
    ----------
    module : path of its module
    operations : names of its operations
    plans : of a chain, one for each combination of shapes that ran
    reason : why it is not fused; empty for a chain
    estimate : of a chain, the expected costs
    captures : how many times its graph was captured, for other shapes, dtypes or modes
    """

    module: str
    operations: tuple[str, ...]
    plans: tuple[Plan, ...] = ()
    reason: str = ""
    estimate: str = ""
    captures: int = 1

    @property
    def where(self) -> str:
        return self.module or "the module"

    @property
    def code(self) -> str:
        return ", ".join(self.operations) or "its own code"


@dataclass(frozen=True)
class Explanation:
    """What `explain()` returns; print it for a table, or `details()` for every plan.

    Attributes
    ----------
    fused : tuple of Part
        The chains that run through cupyfuse.
    left : tuple of Part
        What runs as PyTorch runs it, and why.
    kept : int
        Bytes of prepacked weights: hi/lo splits, sums, folded normalisations.
    """

    fused: tuple[Part, ...]
    left: tuple[Part, ...]
    kept: int = 0

    def __str__(self) -> str:
        if not self.fused and not self.left:
            return "no operation on tensors has run yet: call the module, then ask again"
        working = [part for part in self.left if part.reason != VIEW]
        times = max(part.captures for part in (*self.fused, *self.left))
        recaptured = f"; captured {times} times" if times > 1 else ""
        counts = f"{_plural(len(self.fused), 'chain')} fused, {_plural(len(working), 'operation')} left to PyTorch"
        lines = [counts + recaptured]
        if self.kept:
            lines.append(f"prepacked weights: {self.kept / 1e6:.1f} MB")
        if self.fused:
            lines += ["", "  fused", *self._fused_table()]
        if self.left:
            lines += ["", "  left to PyTorch", *self._left_table()]
        return "\n".join(lines)

    def _fused_table(self) -> list[str]:
        """List the chains, equal ones together, the most frequent first."""
        rows: dict[str, list[Part]] = {}
        for part in self.fused:
            rows.setdefault(_shortened(part.operations), []).append(part)
        lines = []
        ordered = sorted(rows.items(), key=lambda each: -len(each[1]))
        for text, parts in ordered[:_ROWS]:
            lines.append(f"{len(parts):6d} × {text}")
            lines.append(f"           in {_places(parts)}{_costs(parts)}")
        if len(ordered) > _ROWS:
            more = sum(len(parts) for _, parts in ordered[_ROWS:])
            lines.append(f"{more:6d}   in other chains, which details() lists")
        return lines

    def _left_table(self) -> list[str]:
        """List the operations left to PyTorch by reason, the most frequent reason first and views last."""
        reasons: dict[str, Counter[str]] = {}
        for part in self.left:
            reasons.setdefault(part.reason, Counter())[part.code] += 1
        lines = []
        ordered = sorted(reasons.items(), key=lambda each: (each[0] == VIEW, -each[1].total()))
        for reason, names in ordered[:_ROWS]:
            shown = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in names.most_common(4))
            more = f", {len(names) - 4} more" if len(names) > 4 else ""
            text = f"{names.total():6d}   {shown}{more}: {reason}"
            lines += textwrap.wrap(text, _LINE, subsequent_indent=" " * 11)
        if len(ordered) > _ROWS:
            more = str(sum(names.total() for _, names in ordered[_ROWS:]))
            lines.append(f"{more:>6s}   for other reasons, which details() lists")
        return lines

    def details(self) -> str:
        """Describe every chain with its plans, and every operation that was left to PyTorch."""
        lines = []
        for part in self.fused:
            lines.append(f"fused in {part.where}: {' -> '.join(part.operations)}")
            for plan in part.plans:
                lines += ["  " + line for line in str(plan).splitlines()]
        lines += [f"left to PyTorch in {part.where}: {part.code}: {part.reason}" for part in self.left]
        return "\n".join(lines)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _places(parts: list[Part]) -> str:
    """Name the modules in which a chain occurs, those of repeated layers once."""
    if len(parts) == 1:
        return parts[0].where
    patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", part.where) for part in parts))
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    return patterns[0] + more


def _costs(parts: list[Part]) -> str:
    """Describe the launches, captures and expected costs of a chain that may occur several times."""
    launches = sorted({plan.launches for part in parts for plan in part.plans})
    counted = f"; {' or '.join(map(str, launches))} launch{'es' * (launches != [1])}" if launches else ""
    times = max(part.captures for part in parts)
    counted += f"; captured {times} times" if times > 1 else ""
    estimates = list(dict.fromkeys(part.estimate for part in parts if part.estimate))
    return counted + (f"; {estimates[0]}" if estimates else "")


def _shortened(operations: tuple[str, ...]) -> str:
    """Join the names of operations, leaving out some before the last where they are too many for a line."""
    computed = [name for name in operations if name != "identity"]
    text = " -> ".join(computed)
    if len(text) <= _WIDTH:
        return text
    return f"{text[: _WIDTH - 12].rpartition(' -> ')[0]} -> ... -> {computed[-1]}"


def check_module(module: Any) -> None:
    """Raise TypeError if an argument is no module."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")


def explain(module: Any) -> Explanation:
    """Explain what was fused of a module, and of fused and drop-in modules within it, and why the rest was not."""
    check_module(module)
    fused: list[Part] = []
    left: dict[Any, Part] = {}
    kept = 0
    for path, part in module.named_modules():
        captured = part.__dict__.get("_cupyfuse")
        if captured is None:
            continue
        kept += captured.kept
        for found in captured.parts(path):
            if not found.reason:
                fused.append(found)
            else:
                left.setdefault((found.module, found.operations, found.reason, len(left) if path == "" else 0), found)
    return Explanation(tuple(fused), tuple(left.values()), kept)


def refusals(path: str, runners: Iterable[Any]) -> list[Part]:
    """List the chains that were to be fused and ran in eager, with the reasons."""
    return [Part(path, r.chain.operations, (), reason) for r in runners for reason in r.refusals]
