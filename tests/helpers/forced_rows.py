"""Row programs on the CPU in configurations that tests choose, and in several orders of the threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernel_cases import Case
from support import HOST, assert_equal

import cupyfuse as cf
from cupyfuse.cuda.config import Access, Config
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.program import Program
from cupyfuse.engines import kernel_launch

ORDERS = 2


def program_of(function: Any, *arguments: Any) -> Program:
    plan = cf.fuse(function).plan(*arguments)
    (step,) = plan.steps
    return Program(step, plan.scheduled.storage)


def results_of(case: Case) -> tuple[Any, ...]:
    with HOST.active():
        results = HOST.host(cf.fuse(case.program)(*case.laid_out(HOST.xp)))
    return results if isinstance(results, tuple) else (results,)


def force(monkeypatch: pytest.MonkeyPatch, config: Config, cols: int, apart: bool = False) -> None:
    """Let row programs of so many columns run in a configuration, with as many packs a thread as that takes.

    With `apart`, rows that are read may begin elsewhere in a pack than those that are written.
    """

    def choose(found: Program, access: Access, clusters: bool = False) -> Config:
        own = default_config(found, access)
        if own.template in ("elementwise", "column_stats"):
            return own
        vec = min(access.vec, config.vec)
        team = config.group if config.template == "row_lanes" else config.threads * config.cluster // config.rows
        each = -(-cols // (team * vec))
        held = -(-each // config.items) * config.items
        return replace(
            config,
            vec=vec,
            items=config.items if config.packs else each,
            packs=held if config.packs else 0,
            shifted=vec > 1 and (apart or cols % vec != 0),
            apart=vec > 1 and apart,
        )

    monkeypatch.setattr(kernel_launch, "default_config", choose)
    monkeypatch.setattr(kernel_launch, "accesses", lambda *_, **__: iter([Access(config.vec, True, apart), Access(1)]))


def check_in_orders(case: Case) -> None:
    """Compare results with the expected ones, and with those of other orders of the threads."""
    first = results_of(case)
    case.check(first)
    for _ in range(ORDERS - 1):
        for again, before in zip(results_of(case), first, strict=True):
            assert_equal(again, before)
