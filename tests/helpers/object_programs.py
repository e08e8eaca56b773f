"""Random functions that read objects of the user's own classes, and random changes of these between their calls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from object_tables import ARGUMENTS, AS_MID, CHANGES, OBJECTS, READS, STATE, STEPS
from program_module import ProgramModule

from cupyfuse.errors import TraceError


def _items(table: str) -> list[str]:
    return [item.strip() for item in table.split(" |") if item.strip()]


class ObjectProgram(ProgramModule):
    """A function of an array of three elements and an object, in a module of its own with the objects that it reads.

    Parameters
    ----------
    seed : int
        Draws the function, the way in which it gets objects, and the changes.

    Attributes
    ----------
    text : str
        The function and its argument.
    function : callable
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.binds = self._random.random() < 0.5  # whether later calls bind the argument
        self._argument = self._random.choice(ARGUMENTS)
        self.text = self._draw()
        super().__init__(f"object_program_{seed}", f"{STATE}\n{self.text}")

    def argument(self) -> Any:
        """Return the second argument, as it is now."""
        return eval(self._argument, self._module.__dict__)

    def change(self) -> str:
        """Change something around the function; return the statement that did, or that failed."""
        draw = self._random
        a, b = (round(draw.uniform(0.5, 4), 3) for _ in range(2))
        parts = {"o": draw.choice(OBJECTS), "l": draw.choice(OBJECTS[:-4])}
        statement = draw.choice(_items(CHANGES)).format(a, b, draw.randint(1, 5), **parts)
        try:
            exec(statement, self._module.__dict__)
        except (AttributeError, TypeError, ValueError, IndexError):
            return f"{statement}  # failed"
        return statement

    def state(self) -> list[Any]:
        """Return what the objects hold: ids, and the bytes of arrays."""
        found: dict[int, Any] = {}
        names = ("mid", "other", "leaf", "slots", "half", "deep", "seeded", "sown", "held")
        waiting = [self._module.__dict__[name] for name in names]
        while waiting:
            value = waiting.pop()
            if id(value) in found:
                continue
            children: list[Any] = []
            if isinstance(value, (list, tuple)):
                children = list(value)
            elif isinstance(value, dict):
                children = list(value.values())
            elif hasattr(value, "__slots__"):
                children = [getattr(value, name, None) for name in ("k", "w")]
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                children = [child for name, child in vars(value).items() if name != "kept"]
            content = value.tobytes() if isinstance(value, np.ndarray) else [id(child) for child in children]
            found[id(value)] = (value, content)
            waiting += children
        return [found[key][1] for key in sorted(found)]

    def _draw(self) -> str:
        draw = self._random
        whole = draw.random() < 0.5
        form = next((f for start, f in AS_MID.items() if self._argument.startswith(start)), "{0}")
        as_mid = form.format("a")
        ways = [as_mid, as_mid, "mid", "given", "closed"]
        default = draw.choice(["other", "mid"])
        lines = [f"closed = {draw.choice(['mid', 'other'])}", f"def f(x, a, given={default}):"]
        for _ in range(draw.randint(1, 5)):
            m = as_mid if whole else draw.choice(ways)
            reads = [f"({draw.choice(_items(READS)).format(m=m if whole else draw.choice(ways))})" for _ in range(2)]
            step = draw.choice(_items(STEPS)).format(*reads, m=m)
            lines.append(f"    x = {step}")
        lines.append("    return x + 0.0")
        return "\n".join(["def make():", *(f"    {line}" for line in lines), "    return f", f"# a: {self._argument}"])


def compare(program: ObjectProgram, fused: Any, changes: int, errors: dict[str, int] | None = None) -> str | None:
    """Compare a fused function with the plain one, after each of some changes; return what differs, if anything does.

    Calls that are refused are counted in `errors`.
    """
    done: list[str] = []
    x = np.arange(1.0, 4.0)
    bound, argument = None, program.argument()
    for number in range(changes):
        if bound is None:
            argument = program.argument()
            # The bound argument stays the object that it is now, whose attributes change.
            bound = fused.bind(a=argument) if program.binds and number > changes // 3 else None
        else:
            bound.refresh()
        try:
            expected = program.function(x.copy(), argument)
        except (AttributeError, TypeError, ValueError) as error:
            expected = error
        before = program.state()
        for _ in range(program._random.choice((1, 2, 12))):
            try:
                found = fused(x.copy(), argument) if bound is None else bound(x.copy())
            except (TypeError, TraceError, AttributeError, ValueError) as error:
                if isinstance(expected, Exception):
                    continue
                if not isinstance(error, (TypeError, TraceError)):
                    return f"after {done}: {error!r}\n{program.text}"
                if errors is not None:
                    errors[str(error)] = errors.get(str(error), 0) + 1
                continue
            except Exception as error:
                return f"after {done}: {error!r}\n{program.text}"
            if isinstance(expected, Exception):
                return f"after {done}: {found}, expected {expected!r}\n{program.text}"
            if np.shape(found) != np.shape(expected) or not np.allclose(found, expected, rtol=1e-12, equal_nan=True):
                return f"after {done}: {found}, expected {expected}\n{program.text}"
            if program.state() != before:
                return f"after {done}: a call changed the objects\n{program.text}"
        done.append(program.change())
    return None
