"""Random functions that read what is around them in random ways, and random changes of it between their calls."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
from program_module import ProgramModule

# What is around the functions.
_STATE = """
import argparse, collections, dataclasses, functools, types
import numpy as np

class Plain:
    pass

@dataclasses.dataclass
class Record:
    a: object = 1.0
    b: object = 2.0
    def scaled(self, x): return x * self.a
    @property
    def more(self): return self.b + 1

class Base:
    c = 1.5
    def moved(self, x): return x + number

class Derived(Base):
    a, b = 1.0, 2.0
    @staticmethod
    def scaled(x): return x * Derived.a
    @classmethod
    def lowered(cls, x): return x - cls.b

number, count, late = 2.0, 3, 1.0
plain = Plain(); plain.a, plain.b = 1.0, 2.0
plain.inner = Plain(); plain.inner.a, plain.inner.b = 1.0, 2.0
plain.space = types.SimpleNamespace(a=1.0, b=2.0)
module = types.ModuleType("module_of_the_user"); module.__file__ = __file__
module.a, module.b, module.scaled = 1.0, 2.0, lambda x: x * module.a
record, other = Record(), Record()
records = [record, other]
space = types.SimpleNamespace(a=1.0, w=np.ones(3), inner=types.SimpleNamespace(a=1.0, b=2.0))
unknown = types.SimpleNamespace(a=1.0, b=2.0, held=Plain())
options = argparse.Namespace(a=1.0, w=np.ones(3), several=[1.0, np.ones(3)])
table = {"a": 1.0, "b": 2.0, "w": np.ones(3)}
values = [1.0, 2.0, 3]
nested = (1.0, [2.0, 3.0], {"a": 1.0})
array = np.ones(3)
def called(x): return x
called.a, called.b = 1.0, 2.0
bound = functools.partial(lambda x, k: x * k, k=2.0)
"""

_READS = (
    *("number", "count", "plain.a", "plain.b", "plain.inner.a", "plain.inner.b", "plain.space.a", "plain.space.b"),
    *("module.a", "module.b", "record.a", "record.b", "record.more", "other.b", "sum(r.a for r in records)"),
    *("space.a", "space.w", "space.inner.a", "space.inner.b", "(lambda s: s.w)(space)", "getattr(space, 'a')"),
    *("unknown.a", "unknown.b", "options.a", "options.w", "options.several[1]", "(lambda s: s.several[0])(options)"),
    *("[s.w for s in (space, options)][0]", "(space if count > 2 else options).w", "space.w * options.w"),
    *("table['a']", "table['b']", "table['w']", "table.get('z', 0.25)", "table['a'] if 'a' in table else 7"),
    *("values[0]", "values[1]", "len(values)", "max(values)", "[v for v in values if v > 1][0]", "{**table}['a']"),
    *("nested[0]", "nested[1][0]", "nested[2]['a']", "array", "called.a", "called.b", "Derived.a", "Derived.c"),
    *(
        "(plain.a if count > 2 else plain.b)",
        "(lambda: plain.b)()",
        "(lambda: module.a)()",
        "hasattr(plain, 'z') * 1.0",
    ),
    *("np.float32(number)", "int(count)", "(number > 1) + 0.5", "str(count) == '3' or 0.5", "local", "default"),
    *("late", "(lambda: late)()", "abs(number)", "(number if number else 0.25)", "sum([number, count])"),
)
_STEPS = (
    *("x + {0}", "x * {0}", "np.exp(-x * 0.1) + {0}", "np.where(x > {0}, x, {0})", "x * ({0} + {1})"),
    *("module.scaled(x) + {0}", "record.scaled(x) - {0}", "Derived.scaled(x) + {0}", "Derived.lowered(x) * {0}"),
    *("called(x) + {0}", "bound(x) + {0}", "Derived().moved(x) + {0}", "x + {0} if {1} is not None else x"),
    *("(x, {0})[0] * {1}", "functools.reduce(lambda p, q: p + q, [x, {0}])"),
)
_CHANGES = (
    *("number = {0}", "count = {2}", "number = {2}", "count = float({2})", "plain.a = {0}", "plain.b = {0}"),
    *("plain.inner.a = {0}", "plain.inner.b = {0}", "plain.z = {0}", "plain.__dict__.pop('z', None)"),
    *("plain.inner = Record({0}, {1})", "plain.space.a = {0}", "plain.space.b = {0}"),
    *("plain.space = types.SimpleNamespace(a={0}, b={1})", "module.a = {0}", "module.b = {0}"),
    *("module.scaled = lambda x: x * {0}", "record.a = {0}", "record.b = {0}", "other.a = {0}", "other.b = {0}"),
    *("record = Record({0}, {1})", "records.append(Record({0}, {1}))", "Record.scaled = lambda self, x: x * self.b"),
    *("Record.more = property(lambda self: self.a * 2)", "Base.moved = lambda self, x: x - number"),
    *("Derived.scaled = staticmethod(lambda x: x * Derived.b)", "Derived.a = {0}", "Derived.b = {0}", "Base.c = {0}"),
    *("Derived.c = {0}", "space.a = {0}", "space.w = np.full(3, {0})", "space.w[1] = {0}", "space.inner.a = {0}"),
    *("space.inner.b = {0}", "space.new = {0}", "space.inner = types.SimpleNamespace(a={0}, b={1})", "space.w = array"),
    *("unknown.a = {0}", "unknown.b = {0}", "options.a = {0}", "options.w = np.full(3, {0})", "options.w[0] = {0}"),
    *("options.several[0] = {0}", "options.several[1][:] = {0}", "options.w = space.w", "table['a'] = {0}"),
    *("table['b'] = {0}", "table['w'] = np.full(3, {0})", "table['w'][:] = {0}", "table['z'] = {0}"),
    *("table.pop('z', None)", "table = {{'a': {0}, 'b': {1}, 'w': np.full(3, {0})}}", "values[0] = {0}"),
    *("values[1] = {0}", "values.append({0})", "values = [{0}, {1}, 3]", "nested[1][0] = {0}", "nested[2]['a'] = {0}"),
    *("nested = ({0}, [{1}, 3.0], {{'a': {0}}})", "array = np.full(3, {0})", "array[0] = {0}", "called.a = {0}"),
    *("called.b = {0}", "called = (lambda x: x + {0}); called.a, called.b = {0}, {1}"),
    *("bound = functools.partial(lambda x, k: x - k, k={0})", "late = {0}", "globals().pop('late', None)"),
    *("max = lambda values: {0}", "globals().pop('max', None)", "abs = {0}", "globals().pop('abs', None)"),
    *("number = count", "plain.a = number", "values = tuple(values)", "values = list(values)"),
)
# Numbers that compare with others as equal, or with nothing, and such of other types.
_AWKWARD = ("1", "1.0", "True", "0", "-0.0", "float('nan')", "float('inf')", "np.float32(1.5)", "np.float64(1.5)")


class StateProgram(ProgramModule):
    """A function of an array of three elements, in a module of its own with the state that it reads.

    Parameters
    ----------
    seed : int
        Draws the function and the changes.

    Attributes
    ----------
    text : str
        The function and those that it calls.
    function : callable
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.text = self._draw()
        super().__init__(f"state_program_{seed}", f"{_STATE}\n{self.text}")

    def change(self) -> str:
        """Change something around the function; return the statement that did."""
        a, b = (self._number() for _ in range(2))
        statement = self._random.choice(_CHANGES).format(a, b, self._random.randint(1, 5))
        exec(statement, self._module.__dict__)
        return statement

    def _number(self) -> str:
        draw = self._random
        return str(round(draw.uniform(0.5, 4), 3)) if draw.random() < 0.85 else draw.choice(_AWKWARD)

    def _draw(self) -> str:
        draw = self._random
        depth, in_closure = draw.randint(1, 4), draw.random() < 0.5
        lines = ["local = 1.25"]
        for k in range(depth):
            lines.append(f"def f{k}(x, default={draw.choice(['1.5', 'number', 'values[0]'])}):")
            for _ in range(draw.randint(1, 3)):
                step = draw.choice(_STEPS).format(*(f"({draw.choice(_READS)})" for _ in range(2)))
                lines.append(f"    x = {step}")
            if k and draw.random() < 0.8:
                lines.append(f"    x = f{draw.randrange(k)}(x)")
            if draw.random() < 0.3:
                lines.append(f"    x = (lambda y: y + ({draw.choice(_READS)}))(x)")
            lines.append("    return x")
        if in_closure:
            return "\n".join(["def make():", *(f"    {line}" for line in lines), f"    return f{depth - 1}"])
        return "\n".join([*lines, f"def make(): return f{depth - 1}"])


def compare(program: StateProgram, fused: Any, changes: int) -> str | None:
    """Compare a fused function with the plain one, after each of some changes; return what differs, if anything does.

    Functions that are refused are not compared further. One that raises has to do so fused, too.
    """
    done: list[str] = []
    x = np.arange(1.0, 4.0)
    for _ in range(changes):
        expected, refusal = _result_of(program.function, x.copy())
        for _ in range(4):
            found, error = _result_of(fused, x.copy())
            if refusal is None and error is not None:
                if isinstance(error, TypeError) and ("variable" in str(error) or "argument 'fn" in str(error)):
                    return None
                raise error
            is_same = type(error) is type(refusal)
            if not is_same or (error is None and not np.allclose(found, expected, rtol=1e-12, equal_nan=True)):
                return f"after {done}: {found} {error!r}, expected {expected} {refusal!r}\n{program.text}"
        with contextlib.suppress(AttributeError, IndexError, TypeError):  # of what an earlier change has made
            done.append(program.change())
    return None


def _result_of(function: Any, x: Any) -> tuple[Any, Exception | None]:
    try:
        with np.errstate(all="ignore"):
            return function(x), None
    except (NameError, TypeError, ValueError, IndexError) as error:
        return None, error
