"""What was fused of a module, and why the rest was not, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan import Plan

if TYPE_CHECKING:
    from .module import FusedModule, Variant


@dataclass(frozen=True)
class Part:
    """One chain, or one operation that was left to PyTorch.

    Attributes
    ----------
    module : path of the module in which it is
    operations : names of its operations
    plans : of a chain, one for each combination of shapes that ran; empty for what is not fused
    reason : why it is not fused; empty for a chain
    """

    module: str
    operations: tuple[str, ...]
    plans: tuple[Plan, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain()` returns; print it.

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
        lines = []
        for part in self.fused:
            lines.append(f"fused in {part.module or 'the module'}: {' -> '.join(part.operations)}")
            for plan in part.plans:
                lines += ["  " + line for line in str(plan).splitlines()]
        for part in self.left:
            where = part.module or "the module"
            lines.append(f"left to PyTorch in {where}: {', '.join(part.operations) or 'its own code'}: {part.reason}")
        return "\n".join(lines)


def explain(module: FusedModule) -> Explanation:
    """What is known of a fused module and its submodules."""
    fused: dict[Any, Part] = {}
    left: dict[Any, Part] = {}
    for path, part in module.named_modules():
        state = part.__dict__.get("_cupyfuse")
        if state is None:
            continue
        for variants in list(state.variants.values()):
            for variant in variants:
                for found in _of_variant(path, variant):
                    (left if found.reason else fused).setdefault((path, found.operations, found.reason), found)
        for runner in list(state.runners.values()):
            for reason in runner.refusals:
                found = Part(path, runner.chain.operations, (), reason)
                left.setdefault((path, found.operations, reason), found)
    return Explanation(tuple(fused.values()), tuple(left.values()))


def _of_variant(path: str, variant: Variant) -> Iterator[Part]:
    if variant.reason:
        yield Part(path, (), (), variant.reason)
    if variant.program is not None:
        for runner in variant.program.runners:
            yield Part(path, runner.chain.operations, tuple(entry.plan for entry in runner.entries))
    if variant.partition is not None:
        operations = variant.partition.record.operations
        for k, reason in variant.partition.left.items():
            where = ".".join(p for p in (path, operations[k].path) if p)
            yield Part(where, (operations[k].name,), (), reason)
