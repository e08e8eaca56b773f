"""The smallest program that still fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from nd_programs import Program
from nd_trials import Way, trial


def failure(program: Program, way: Way, seed: object) -> str:
    """How a trial fails, without its numbers; an empty string where it passes."""
    try:
        with way.engine.active():
            trial(program, way, np.random.default_rng(seed))
    except Exception as error:
        kind = re.sub(r"\ba\d+|\bv\d+|[-\d.e]+|, ", "#", str(error).split("\n")[0])
        return f"{type(error).__name__}: {kind[:40]}"
    return ""


def shrunk(program: Program, way: Way, seed: object) -> tuple[Program, Way]:
    """Drop lines, results, arguments and special ways as long as the program fails as before."""
    wanted = failure(program, way, seed)
    assert wanted, "the program passes"
    progress = True
    while progress:
        progress = False
        for smaller, its_way in [*_smaller(program, way)]:
            try:
                fails = failure(smaller, its_way, seed) == wanted
            except SyntaxError:
                continue
            if fails:
                program, way, progress = smaller, its_way, True
                break
    return program, way


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)


def _smaller(program: Program, way: Way) -> Iterator[tuple[Program, Way]]:
    """Yield programs with less: a plainer way to run, a result, a line or an argument left out."""
    p = program
    if way.bound or way.max_workspace or set(way.layouts) - {"contiguous"}:
        yield p, replace(way, bound=(), layouts=(), max_workspace=0)
        yield p, replace(way, layouts=(), max_workspace=0)
        yield p, replace(way, bound=(), max_workspace=0)
        yield p, replace(way, bound=(), layouts=())
    for k in range(len(p.returned)):
        if len(p.returned) > 1:
            yield Program(p.names, p.lines, p.returned[:k] + p.returned[k + 1 :], p.drawn), way
    for k in reversed(range(len(p.lines))):
        rest = p.lines[:k] + p.lines[k + 1 :]
        made = re.match(r"(v\d+) = (.*)", p.lines[k])
        if made is None or (made[1] not in p.returned and not any(re.search(rf"\b{made[1]}\b", line) for line in rest)):
            yield Program(p.names, rest, p.returned, p.drawn), way
            continue
        for other in dict.fromkeys(re.findall(r"\b[av]\d+\b", made[2])):
            later = [_renamed(line, made[1], other) for line in p.lines[k + 1 :]]
            returned = list(dict.fromkeys(_renamed(name, made[1], other) for name in p.returned))
            if not set(returned) & set(p.names):
                yield Program(p.names, p.lines[:k] + later, returned, p.drawn), way
    text = " ".join([*p.lines, *p.returned])
    for k, name in enumerate(p.names):
        if len(p.names) > 1 and not re.search(rf"\b{name}\b", text):
            kept = [i for i in range(len(p.names)) if i != k]
            layouts = tuple(way.layouts[i] for i in kept) if way.layouts else ()
            bound = tuple(n for n in way.bound if n != name)
            names, drawn = ([given[i] for i in kept] for given in (p.names, p.drawn))
            yield Program(names, p.lines, p.returned, drawn), replace(way, bound=bound, layouts=layouts)
