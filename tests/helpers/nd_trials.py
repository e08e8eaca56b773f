"""Trials of random programs: each runs fused, in one of several ways, and is compared with what it should give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from nd_programs import Program, check, drawn_program
from support import HOST, LAYOUTS, NUMPY, Engine, lay_out

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.api import planned_function
from cupyfuse.ir import graph as g
from cupyfuse.ir.kinds import is_product
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import MOST_FLOPS, cost_of, unfused_cost
from cupyfuse.plan.views import with_views_stored
from cupyfuse.rewrite import replace_library_calls, simplify
from cupyfuse.settings import force_plans

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Way:
    """How a program runs.

    Attributes
    ----------
    engine : Engine
    bound : tuple of str
        Arguments that are bound.
    layouts : tuple of str
        How each argument lies in memory; "shared": in memory that another one lies in.
    max_workspace : int
        0: as much as is allowed by default.
    planned : bool
        Whether the plan runs, also where the function as written is faster.
    """

    engine: Engine = NUMPY
    bound: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    max_workspace: int = 0
    planned: bool = True


def way_of(number: int, program: Program, rng: np.random.Generator) -> Way:
    """The way of a trial: every 20th runs as kernels, every 20th with bound arguments, every 10th in little
    memory, and every 20th as written if that is faster."""
    layouts = tuple(str(rng.choice([*LAYOUTS, "contiguous", "shared"])) for _ in program.names)
    bound = tuple(n for n in program.names if rng.random() < 0.5) if number % 20 == 7 else ()
    engine, workspace = HOST if number % 20 == 3 else NUMPY, 256 if number % 10 == 5 else 0
    return Way(engine, bound, layouts, workspace, number % 20 != 9)


def trial_of(number: int) -> tuple[Program, Way, tuple[int, int]]:
    """The program of a number, the way in which it runs, and what its arguments are drawn from."""
    program = drawn_program(number, longest=6 if number % 20 == 3 else 60)  # short, since kernels are compiled
    return program, way_of(number, program, np.random.default_rng((number, 1))), (number, 2)


def trials(numbers: Iterable[int], report: Callable[[int, Exception], None], kernels: bool = True) -> None:
    """Run the trials of some numbers, and report those that fail; all kernels are compiled together."""
    some = [(n, *trial_of(n)) for n in numbers]
    on_host = [t for t in some if t[2].engine is HOST and kernels]
    with HOST.active(), HOST.runtime.only_collecting():
        for number, program, way, seed in on_host:
            try:
                trial(program, way, np.random.default_rng(seed))
            except Exception as error:
                report(number, error)
    for number, program, way, seed in some:
        if way.engine is HOST and not kernels:
            continue
        with way.engine.active():
            try:
                trial(program, way, np.random.default_rng(seed))
            except Exception as error:
                report(number, error)


def placed(engine: Engine, arrays: Sequence[Array], layouts: Sequence[str], sharing: bool) -> list[Any]:
    """The arrays as their layouts say; those that share memory have the values that lie there."""
    given: list[Any] = []
    for array, layout in zip(arrays, layouts or ["contiguous"] * len(arrays), strict=True):
        if layout != "shared":
            given.append(lay_out(engine.xp, array, layout))
            continue
        wholes = [a for a in given if sharing and a.dtype == array.dtype and a.flags.c_contiguous]
        whole = max(wholes, key=lambda a: a.size, default=None)
        if whole is None or whole.size < array.size or array.dtype.kind in "iu":
            given.append(lay_out(engine.xp, array, "contiguous"))
        else:
            given.append(whole.reshape(-1)[whole.size - array.size :].reshape(array.shape))
    return given


def trial(program: Program, way: Way, rng: np.random.Generator, calls: int = 2) -> float:
    """Run a program, again with other values, and compare; returns the share of elements for which something is
    claimed."""
    options: dict[str, Any] = {"max_workspace": way.max_workspace} if way.max_workspace else {}
    fused = cf.fuse(program.function(cf), **options)
    shares = []
    for _ in range(calls):
        arguments = placed(way.engine, program.arguments(rng), way.layouts, not program.changes)
        expected, after = program.expected(way.engine.host(arguments))
        with recorded() as built, force_plans() if way.planned else contextlib.nullcontext():
            if way.bound:
                named = dict(zip(program.names, arguments, strict=True))
                serve = fused.bind(**{n: named[n] for n in way.bound})
                results = serve(**{n: a for n, a in named.items() if n not in way.bound})
            else:
                results = fused(*arguments)
        if way.engine is HOST and HOST.runtime.dry:
            continue
        shares.append(check(way.engine.host(results), expected, program.returned))
        check(way.engine.host(arguments), after, program.names)
        for graph, plan in built if not way.bound else ():
            costs_hold(graph, plan)
    return float(np.mean(shares)) if shares else 1.0


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, Plan]]]:
    """Record the graphs that are traced, and their plans."""
    made: list[tuple[Any, Plan]] = []
    build = planned_function.build

    def record(traced: Any, *args: Any, **options: Any) -> Plan:
        plan = build(traced, *args, **options)
        made.append((with_views_stored(traced.graph, traced.viewed), plan))
        return plan

    with mock.patch.object(planned_function, "build", record):
        yield made


def costs_hold(graph: Any, plan: Plan) -> None:
    """Assert what plans promise: at most 1.5 times the operations, and no more bytes.

    As written, or as rewritten, which takes a logsumexp apart. Not counted are copies of arguments and what operations
    one by one have for free: conversions between dtypes, constants and broadcasts, the float32 results of 16-bit
    products, reductions and library steps, and results, which a step writes also where NumPy returns a view. Of a plan
    in blocks one block counts; as written, a sum over all blocks is written once, here as zeros, then read and written.
    """
    if plan.settings.on_gpu:  # arithmetic that takes the place of a library's counts, as the library's does not
        graph, _ = replace_library_calls(graph)
    forms, cost = [unfused_cost(graph), unfused_cost(simplify(graph)[0])], cost_of(plan.steps)
    free = sum(s.reads + s.writes for s in plan.steps if s.kind == "Copy") + 8 * len(plan.steps)
    free += 2 * sum(root.nbytes for root in graph.roots)
    if plan.blocks is not None and plan.blocks.zeros is not None:
        free += 2 * sum(step.writes for step in plan.blocks.zeros.steps)
    for node in g.topological(plan.graph.roots):
        if node.op in ("cast", "broadcast", "library"):
            free += 2 * max(node.nbytes, *(i.nbytes for i in node.inputs))
        elif (is_product(node) or node.reduction) and dtypes.compute_dtype(node.dtype) != node.dtype:
            free += 4 * node.nbytes  # for the step that writes it, and for three that read it
    products, flops, moved = (max(f) for f in zip(*((w.products, w.repeatable, w.bytes) for w in forms), strict=True))
    assert cost.products <= products, f"products: {cost.products} > {products}"
    assert cost.repeatable <= MOST_FLOPS * flops, f"FLOPs: {cost.repeatable} > 1.5 * {flops}"
    assert cost.bytes - free <= moved, f"bytes: {cost.bytes} - {free} > {moved}"
