"""The check of plans: whatever breaks the order of the steps, or what they say that they read, is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse import settings
from cupyfuse.plan import prepacking
from cupyfuse.plan.plan import Blocks, Plan
from cupyfuse.plan.schedule import Step
from cupyfuse.plan.schedule.cut import WHOLE
from cupyfuse.plan.soundness import check_plan

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "columns": lambda x, w, v: cf.softmax(x, axis=0) - x.sum(axis=0),
    "rows and columns": lambda x, w, v: (x.sum(axis=1, keepdims=True) - x / x.max(axis=0)).max(axis=0),
    "copies": lambda x, w, v: np.exp(x).T.reshape(-1),
    "library": lambda x, w, v: np.sort(x * 2, axis=1).sum(axis=0) + 1,
    "normalized": lambda x, w, v: (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5),
    "two products": lambda x, w, v: (x @ w.T) * cf.sigmoid(x @ v.T),
    "chained products": lambda x, w, v: cf.gelu(x @ w.T) @ v,
    "reduced product": lambda x, w, v: cf.logsumexp(x @ w.T, axis=1) + x.sum(axis=1),
}
PRECISIONS = ("highest", "high")


def plan_of(name: str, precision: Any = "high", dtype: str = "float32", **options: Any) -> Plan:
    """A plan for a GPU whose products have epilogues, whatever they cost."""
    with settings.epilogues("always"):
        fused = cf.fuse(FUNCTIONS[name], precision=precision, **options)
        return fused.plan(*(cf.spec(shape, dtype) for shape in ((96, 64), (128, 64), (128, 64))))


def check(plan: Plan) -> None:
    check_plan(plan, plan.graph.inputs)


def with_steps(plan: Plan, steps: list[Step]) -> Plan:
    return replace(plan, scheduled=replace(plan.scheduled, steps=steps))


def everything() -> Iterator[Plan]:
    for name in FUNCTIONS:
        for precision in PRECISIONS:
            for dtype in ("float32", "bfloat16"):
                yield plan_of(name, precision, dtype)


def test_steps_that_are_missing_doubled_or_too_early_are_found() -> None:
    moved = 0
    for plan in everything():
        steps = list(plan.steps)
        for k, step in enumerate(steps):
            with pytest.raises(AssertionError, match=r"before it is written|no step writes the result"):
                check(with_steps(plan, steps[:k] + steps[k + 1 :]))
            with pytest.raises(AssertionError, match=f"step {k + 1}, {step.kind} of .* again"):
                check(with_steps(plan, [*steps[: k + 1], *steps[k:]]))
        if any(n in step.inputs for step in steps[1:] for n in steps[0].outputs):
            moved += 1
            with pytest.raises(AssertionError, match=r"reads <.* before it is written"):
                check(with_steps(plan, [*steps[1:], steps[0]]))
    assert moved > len(FUNCTIONS)


def test_reads_that_a_step_does_not_declare_are_found() -> None:
    kinds = set()
    for plan in everything():
        for k, step in enumerate(plan.steps):
            for name in ("inputs", "repair_inputs"):
                for left in getattr(step, name):
                    rest = tuple(n for n in getattr(step, name) if n is not left)
                    steps = [*plan.steps[:k], replace(step, **{name: rest}), *plan.steps[k + 1 :]]
                    with pytest.raises(AssertionError, match=rf"step {k}, .*none of its inputs"):
                        check(with_steps(plan, steps))
                    kinds.add(step.kind)
    assert kinds == {"RowProgram", "ColumnStats", "Gemm", "Copy", "Library"}


def test_nodes_of_a_step_are_in_the_order_in_which_they_need_each_other() -> None:
    plan = plan_of("normalized")
    (step,) = plan.steps
    with pytest.raises(AssertionError, match=r"computes <.* from <.*, which is none of its inputs"):
        check(with_steps(plan, [replace(step, nodes=step.nodes[::-1])]))


def test_epilogues_read_what_their_step_reads() -> None:
    plan = plan_of("two products", dtype="bfloat16")
    k, step = next((k, s) for k, s in enumerate(plan.steps) if s.epilogue is not None and s.epilogue.nodes)
    assert step.epilogue is not None
    for changes in ({"inputs": (*step.epilogue.inputs, plan.graph.inputs[1])}, {"inputs": ()}):
        fused = replace(step, epilogue=replace(step.epilogue, **changes))
        others = tuple(n for n in step.inputs if n is not plan.graph.inputs[1])
        for changed in (fused, replace(fused, inputs=others)):
            with pytest.raises(AssertionError, match="none of its inputs"):
                check(with_steps(plan, [*plan.steps[:k], changed, *plan.steps[k + 1 :]]))


def test_results_are_computed_by_their_step() -> None:
    plan = plan_of("columns")
    *first, last = plan.steps
    with pytest.raises(AssertionError, match="which it does not compute"):
        check(with_steps(plan, [*first, replace(last, nodes=last.nodes[:-1])]))


# Phases -------------------------------------------------------------------------------------------------------------


def blocked() -> Plan:
    """A plan with all phases: blocks read arguments and computed values, share some, add to sums and are followed."""

    def function(x: Any, w: Any) -> Any:
        top = w.max(axis=0)
        scale = np.exp(np.median(top))
        y = (x * scale) @ (w * top).T
        return cf.logsumexp(y, axis=1).sum() * top, scale + 1, cf.softmax(y, axis=1).T @ x

    return cf.fuse(function, max_workspace=6000).plan(cf.spec((90, 5)), cf.spec((40, 5)))


CHANGES: dict[str, Callable[[Blocks], dict[str, Any]]] = {
    "another argument": lambda b: {"sources": (b.sources[0]._replace(number=1), *b.sources[1:])},
    "no such argument": lambda b: {"sources": (b.sources[0]._replace(number=-1), *b.sources[1:])},
    "a whole argument": lambda b: {"sources": (b.sources[0]._replace(mode=WHOLE), *b.sources[1:])},
    "nothing before the blocks": lambda b: {"before": None},
    "nothing that they share": lambda b: {"common": None},
    "no sums": lambda b: {"zeros": None},
    "more rows": lambda b: {"rows": b.rows + 1},
    "a last block like the others": lambda b: {"last": b.plan},
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_read_what_plans_before_them_compute(change: str) -> None:
    plan = blocked()
    assert plan.blocks is not None
    assert all((plan.blocks.before, plan.blocks.common, plan.blocks.zeros, plan.blocks.last, plan.blocks.after))
    check(plan)
    changed = replace(plan.blocks, **CHANGES[change](plan.blocks))
    with pytest.raises(AssertionError, match=r"<input .*> is given Given"):
        check(replace(plan, blocks=changed))


def test_prepacked_values_are_computed_from_bound_arguments() -> None:
    x, w = np.zeros((96, 64), np.float32), np.zeros((128, 64), np.float32)
    plan = cf.fuse(lambda x, w: x @ w.T + w.sum(axis=1)).bind(w=w).plan(x)
    assert plan.prepare is not None
    arguments = plan.graph.inputs[:2]
    check_plan(plan, arguments, {1})
    with pytest.raises(AssertionError, match=r"prepacked once: <input .*> is given .*nothing"):
        check_plan(plan, arguments, {0})
    with pytest.raises(AssertionError, match=r"is given .*nothing"):
        check_plan(replace(plan, prepare=None), arguments, {1})


def test_every_plan_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "separate_columns", lambda steps, *_: steps[::-1])
    with pytest.raises(AssertionError, match=r"step 0, RowProgram of .* reads <.*> before it is written"):
        plan_of("columns")
