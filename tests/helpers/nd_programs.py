"""Random NumPy functions of arrays of any number of dimensions, drawn as source text.

A `Draft` holds the values that exist so far, as plain NumPy computes them; each of its methods draws one more line.
A `Program` is the function, its arguments, and what it should give (`bounded`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import bounded
import bounds
import ml_dtypes
import numpy as np
from bounded_functions import BoundedFunctions
from chains import extremes
from language import ACTIVATIONS
from support import SPECIALS, dtype_of

from cupyfuse.ir.operators import POINTWISE

Array = np.ndarray[Any, Any]
LARGEST = 1500  # elements of a value
_DIMENSIONS = 5


class _PlainFunctions:
    """cupyfuse's functions, evaluated with NumPy."""

    def __getattr__(self, name: str) -> Any:
        if name in ("softmax", "log_softmax", "logsumexp"):
            return _softmaxes[name]
        row, numbers = POINTWISE[name], ACTIVATIONS[name][1]
        return lambda x, *_: np.asarray(row.numpy(x, *numbers)).astype(x.dtype)[()]


def _logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    top = x.max(axis=axis, keepdims=True)
    with np.errstate(all="ignore"):
        total = top + np.log(np.exp(x - top).sum(axis=axis, keepdims=True))
    return (total if keepdims else np.squeeze(total, axis)).astype(x.dtype)[()]  # without dimensions, a scalar


_softmaxes: dict[str, Callable[..., Any]] = {
    "logsumexp": _logsumexp,
    "log_softmax": lambda x, axis: x - _logsumexp(x, axis, True),
    "softmax": lambda x, axis: np.exp(x - _logsumexp(x, axis, True)),
}


@dataclass(frozen=True)
class Argument:
    """How an argument is drawn.

    Attributes
    ----------
    below : int
        Integers are drawn in range(-below, below), as indices of so many elements; of other integers it is 0.
    share : float
        Of special values.
    """

    shape: tuple[int, ...]
    dtype: str
    scale: float = 1.0
    share: float = 0.0
    extreme: bool = False
    below: int = 0

    def draw(self, rng: np.random.Generator) -> Array:
        """Draw the array."""
        if self.dtype == "bool":
            return np.asarray(rng.random(self.shape) < 0.5)
        if self.below:
            return np.asarray(rng.integers(-self.below, self.below, self.shape)).astype(self.dtype)
        if self.dtype not in bounded.FLOATS:
            return np.asarray(rng.integers(0 if self.dtype.startswith("u") else -6, 7, self.shape)).astype(self.dtype)
        array = np.asarray(rng.standard_normal(self.shape) * self.scale)
        if self.share:
            specials = [*SPECIALS, *(extremes(self.dtype) if self.extreme else ())]
            array = np.where(rng.random(self.shape) < self.share, rng.choice(specials, self.shape), array)
        with np.errstate(all="ignore"):
            return np.asarray(array).astype(dtype_of(self.dtype))


class Program:
    """A function, as source text, and how its arguments are drawn."""

    def __init__(self, names: Sequence[str], lines: Sequence[str], returned: Sequence[str], drawn: Sequence[Argument]):
        self.names, self.lines, self.returned, self.drawn = list(names), list(lines), list(returned), list(drawn)
        body = [*self.lines, f"return {', '.join(self.returned)},"]
        self.source = "\n".join([f"def program({', '.join(self.names)}):", *(f"    {line}" for line in body)])

    @property
    def changes(self) -> bool:
        """Whether it changes anything in place."""
        return not all(re.match(r"v\d+ = ", line) for line in self.lines)

    def function(self, cf: Any) -> Callable[..., Any]:
        """The function, which finds cupyfuse's functions in `cf`."""
        scope: dict[str, Any] = {"np": np, "cf": cf, "ml_dtypes": ml_dtypes}
        exec(compile(self.source, "<program>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]

    def arguments(self, rng: np.random.Generator) -> list[Array]:
        return [a.draw(rng) for a in self.drawn]

    def plain(self, arguments: Sequence[Array]) -> Any:
        with np.errstate(all="ignore"):
            return self.function(_PlainFunctions())(*arguments)

    def expected(self, arguments: Sequence[Array]) -> tuple[list[bounded.Bounded], list[bounded.Bounded]]:
        """What the results should be, and the arguments after the call."""
        given = [bounded.Bounded.argument(a) for a in arguments]
        with np.errstate(all="ignore"):
            return list(self.function(BoundedFunctions())(*given)), given

    def __repr__(self) -> str:
        return "\n".join([*(f"# {n}: {a}" for n, a in zip(self.names, self.drawn, strict=True)), self.source])


def check(results: Sequence[Any], expected: Sequence[bounded.Bounded], names: Sequence[str]) -> float:
    """Assert that each result is what it should be; returns the share of elements for which something is claimed."""
    __tracebackhide__ = True
    shares = []
    for result, value, name in zip(results, expected, names, strict=True):
        actual = np.asarray(result)
        if value.name in bounded.FLOATS or value.name == "bool":
            shares.append(bounds.check(actual, value.value, name))
        else:
            assert (actual.dtype, actual.shape) == (value.dtype, value.shape), f"{name}: {actual.dtype}{actual.shape}"
            wrong = (actual != value.v) & np.isfinite(value.e)
            assert not wrong.any(), f"{name}: {actual[wrong][0]}, expected {value.v[wrong][0]}"
    return float(np.mean(shares)) if shares else 1.0


def root(x: Any) -> int:
    """What an array is a view of, through any number of views."""
    while x.base is not None:
        x = x.base
    return id(x)


class Draft:
    """A function under construction."""

    def __init__(self, rng: np.random.Generator, length: int):
        self.rng = rng
        self.names: list[str] = []
        self.values: list[Any] = []
        self.lines: list[str] = []
        self.drawn: list[Argument] = []
        self.given: list[str] = []
        self.frozen: set[int] = set()  # what shares memory with a reshaped or broadcast array
        self.held: list[Any] = []  # so that no two have the same identity
        dtypes = ["float64"] * 6 + ["float32"] * 3 + ["float16", "bfloat16"]
        self.dtypes = [self.one(dtypes)]
        if rng.random() < 0.25:
            self.dtypes = ["float64", "float32", "float16", self.one(dtypes)]
        self.sizes = self.one([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2, 3), (1, 4, 7, 16), (1, 33, 3)])
        self.share, self.extreme = self.one([0.0, 0.0, 0.0, 0.0, 0.02, 0.1]), bool(rng.random() < 0.3)
        self.floats_only = bool(rng.random() < 0.5)
        self.argument(self.shape(int(self.one([0, 1, 2, 2, 2, 3, 3, 4]))))
        some = self.makers()
        if rng.random() < 0.4:  # deep alternations of a few kinds
            some = [some[int(k)] for k in rng.integers(0, len(some), 4)]
        tries = 0
        while len(self.lines) < length and tries < 4 * length:
            tries += 1
            self.one(some)()

    # Drawing
    def one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def shape(self, ndim: int) -> tuple[int, ...]:
        shape = tuple(self.one(self.sizes) for _ in range(ndim))
        return shape if np.prod(shape) <= LARGEST else shape[:2]

    def argument(self, shape: Sequence[int], dtype: str = "", below: int = 0) -> int:
        dtype = dtype or self.one(self.dtypes)
        scale = self.one([1.0, 1.0, 0.1, 8.0])
        drawn = Argument(tuple(shape), dtype, scale, self.share, self.extreme, below)
        self.drawn.append(drawn)
        self.given.append(f"a{len(self.given)}")
        self.add(self.given[-1], drawn.draw(self.rng))
        return len(self.values) - 1

    def add(self, name: str, value: Any) -> None:
        self.names.append(name)
        self.values.append(value)

    def scope(self) -> dict[str, Any]:
        return dict(zip(self.names, self.values, strict=True))

    def emit(self, text: str, frozen: Sequence[int] = ()) -> bool:
        """One more value, unless NumPy refuses it or it is too large."""
        scope = {"np": np, "cf": _PlainFunctions(), "ml_dtypes": ml_dtypes}
        try:
            with np.errstate(all="ignore"):
                value = eval(text, scope, self.scope())
        except (ValueError, TypeError, IndexError, ZeroDivisionError, OverflowError):
            return False
        if not hasattr(value, "dtype"):
            return False  # Python's 0, as np.dot returns for empty vectors of float16 and bfloat16
        if value.size > LARGEST or value.ndim > _DIMENSIONS or value.dtype.name not in _DTYPES:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.add(name, value)
        for i in (*frozen, *([len(self.values) - 1] if frozen else [])):
            self.held.append(self.values[i])
            self.frozen.add(root(self.values[i]) if isinstance(self.values[i], np.ndarray) else -1)
        self.calm(value)
        return True

    def calm(self, value: Any) -> None:
        """Keep numbers from growing along a deep program."""
        if value.dtype.name in bounded.FLOATS and value.size:
            size = np.abs(value[np.isfinite(value)].astype(float)).max(initial=0)
            if size > 50 and self.chance(0.7):
                self.emit(f"np.tanh({self.names[-1]})")

    def change(self, text: str) -> bool:
        """A line that changes an array in place."""
        scope: dict[str, Any] = {"np": np, "cf": _PlainFunctions(), **self.scope()}
        try:
            with np.errstate(all="ignore"):
                exec(text, scope)
        except (ValueError, TypeError, IndexError, OverflowError):
            return False
        self.lines.append(text)
        return True

    # Choosing operands
    def pick(self, kinds: str = "f", least: int = 0) -> int | None:
        """One of the values of some kinds of dtypes; the latest is the likeliest."""
        fitting = [i for i, v in enumerate(self.values) if self.kind(i) in kinds and v.ndim >= least]
        if not fitting:
            return None
        return fitting[-1] if self.chance(0.6) else self.one(fitting[-12:])

    def kind(self, i: int) -> str:
        kind = self.values[i].dtype.kind
        return {"V": "f", "u": "i"}.get(kind, kind)

    def partner(self, i: int, kinds: str = "f") -> int:
        """A value, or an argument, that can be broadcast with another one."""
        x = self.values[i]
        if self.chance(0.6):
            fitting = [j for j, v in enumerate(self.values) if self.kind(j) in kinds and self.fits(x, v)]
            if fitting:
                return int(self.one(fitting[-10:]))
        shape = tuple(1 if self.chance(0.4) else n for n in x.shape)
        if self.chance(0.3):
            shape = shape[int(self.rng.integers(0, x.ndim + 1)) :]
        elif x.ndim < 4 and x.size * 4 < LARGEST and self.chance(0.2):
            shape = (self.one(self.sizes), *shape)
        dtype = "" if "f" in kinds else self.one(_INTEGERS) if "i" in kinds else "bool"
        return self.argument(shape, dtype)

    def fits(self, x: Any, y: Any) -> bool:
        try:
            return bool(np.prod(np.broadcast_shapes(x.shape, y.shape)) <= LARGEST)
        except ValueError:
            return False

    def axis(self, i: int) -> int:
        return int(self.rng.integers(-self.values[i].ndim, self.values[i].ndim))

    def axes(self, i: int) -> Any:
        n = self.values[i].ndim
        if self.chance(0.5) and n:
            return self.axis(i)
        some = tuple(p - n * self.chance(0.3) for p in range(n) if self.chance(0.4))
        return some or None

    def index(self, shape: Sequence[int], news: bool = True) -> str:
        """An index of slices, integers, new axes and an ellipsis."""
        items: list[str] = []
        for n in shape:
            kind = self.rng.random()
            if kind < 0.2 and n:
                items.append(str(int(self.rng.integers(-n, n))))
            elif kind < 0.5:
                items.append(":")
            else:
                ends = ["" if self.chance(0.3) else str(int(self.rng.integers(-n - 1, n + 2))) for _ in "ab"]
                items.append(":".join([*ends, self.one(["", "", "1", "2", "3", "-1", "-2"])]))
        if news and self.chance(0.2):
            items.insert(int(self.rng.integers(0, len(items) + 1)), "None")
        if items and self.chance(0.2):
            k = int(self.rng.integers(0, len(items)))
            items[k] = "..."
            if self.chance(0.5):
                items = items[: k + 1] if self.chance(0.5) else items[k:]
        return ", ".join(items) or "..."

    def makers(self) -> list[Callable[[], Any]]:
        from nd_lines import lines_of

        return lines_of(self)

    def program(self) -> Program:
        if len(self.names) == len(self.given):
            self.emit(f"{self.names[0]} * 2")
        made = [n for n in self.names if n not in self.given]
        text = " ".join(line.partition("= ")[2] for line in self.lines)
        unread = [n for n in made if not re.search(rf"\b{n}\b", text)]
        others = [*unread[-int(self.one([1, 3, 6])) :], *(self.one(made) for _ in range(int(self.one([0, 0, 1, 2]))))]
        return Program(self.given, self.lines, list(dict.fromkeys([made[-1], *others])), self.drawn)


_INTEGERS = ("int64", "int64", "int32", "int8", "uint8")
_DTYPES = (*bounded.FLOATS, "bool", "int8", "int16", "int32", "int64", "uint8")


def drawn_program(seed: Any, longest: int = 60) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    lengths = [n for n in (2, 3, 4, 4, 5, 6, 8, 8, 12, 12, 20, 60) if n <= longest]
    return Draft(rng, int(rng.choice(lengths))).program()
