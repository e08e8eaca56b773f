"""Activations that are written by hand with other operators, recognised by a table of identities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from .notes import Note


class _Value:
    """A node with Python's operators, to write the formulas of the table."""

    def __init__(self, node: Node):
        self.node = node

    def __neg__(self) -> _Value:
        return _apply("negative", self)

    def __add__(self, other: Any) -> _Value:
        return _apply("add", self, other)

    def __sub__(self, other: Any) -> _Value:
        return _apply("subtract", self, other)

    def __mul__(self, other: Any) -> _Value:
        return _apply("multiply", self, other)

    def __truediv__(self, other: Any) -> _Value:
        return _apply("divide", self, other)

    def __radd__(self, other: float) -> _Value:
        return _apply("add", other, self)

    def __rmul__(self, other: float) -> _Value:
        return _apply("multiply", other, self)

    def __rtruediv__(self, other: float) -> _Value:
        return _apply("divide", other, self)


def _apply(op: str, *operands: Any) -> _Value:
    return _Value(g.pointwise(op, *(x.node if isinstance(x, _Value) else g.const(x) for x in operands)))


class _Namespace:
    """The namespace `o` of the table's formulas: every operator by its name."""

    def __getattr__(self, name: str) -> Callable[..., _Value]:
        return lambda *x: _apply(name, *x)


Formula = Callable[[Any, Any], _Value]


@dataclass(frozen=True)
class Identity:
    """One identity: an operator of x, and the same value written with other operators.

    Attributes
    ----------
    text : the identity, and where its sides differ by more than rounding, if anywhere; for notes
    operator, written : formulas of the namespace of operators and x
    in_float64 : whether the operator takes no longer in float64 either
    """

    text: str
    operator: Formula
    written: Formula
    in_float64: bool = True


_GELU_TANH = math.sqrt(2.0 / math.pi)


def _softplus(o: Any, x: Any) -> _Value:
    value: _Value = o.softplus(x, 1.0, math.inf)
    return value


IDENTITIES = (
    Identity("1 / (1 + exp(-x)) = sigmoid(x)", lambda o, x: o.sigmoid(x), lambda o, x: 1.0 / (1.0 + o.exp(-x))),
    Identity("1 / (1 + exp(x)) = sigmoid(-x)", lambda o, x: o.sigmoid(-x), lambda o, x: 1.0 / (1.0 + o.exp(x))),
    Identity("x / (1 + exp(-x)) = silu(x)", lambda o, x: o.silu(x), lambda o, x: x / (1.0 + o.exp(-x))),
    Identity("x sigmoid(x) = silu(x)", lambda o, x: o.silu(x), lambda o, x: x * o.sigmoid(x)),
    Identity(
        "x / 2 (1 + erf(x / sqrt(2))) = gelu(x), also far from zero",
        lambda o, x: o.gelu(x),
        lambda o, x: 0.5 * x * (1.0 + o.erf(x * math.sqrt(0.5))),
        in_float64=False,  # erfc takes 66 instructions of float64, erf 47
    ),
    Identity(
        "x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = gelu_tanh(x)",
        lambda o, x: o.gelu_tanh(x),
        lambda o, x: 0.5 * x * (1.0 + o.tanh(_GELU_TANH * (x + 0.044715 * x * x * x))),
    ),
    Identity(
        "x / 2 (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2))) = gelu_tanh(x)",
        lambda o, x: o.gelu_tanh(x),
        lambda o, x: 0.5 * x * (1.0 + o.tanh(_GELU_TANH * x * (1.0 + 0.044715 * x * x))),
    ),
    Identity(
        "max(x, 0) + log1p(exp(-|x|)) = softplus(x)",
        _softplus,
        lambda o, x: o.maximum(x, 0.0) + o.log1p(o.exp(-o.absolute(x))),
    ),
    Identity(
        "relu(x) + log1p(exp(-|x|)) = softplus(x)", _softplus, lambda o, x: o.relu(x) + o.log1p(o.exp(-o.absolute(x)))
    ),
    # log1p(exp(x)) itself stays as it is: it is infinite where the exponential is. Its tanh is 1 there.
    Identity("x tanh(log1p(exp(x))) = mish(x)", lambda o, x: o.mish(x), lambda o, x: x * o.tanh(o.log1p(o.exp(x)))),
    Identity(
        "x tanh(log(1 + exp(x))) = mish(x), also far from zero",
        lambda o, x: o.mish(x),
        lambda o, x: x * o.tanh(o.log(1.0 + o.exp(x))),
    ),
    Identity(
        "x tanh(softplus(x)) = mish(x)", lambda o, x: o.mish(x), lambda o, x: x * o.tanh(o.softplus(x, 1.0, math.inf))
    ),
    Identity(
        "x tanh(softplus(x)) = mish(x)", lambda o, x: o.mish(x), lambda o, x: x * o.tanh(o.softplus(x, 1.0, 20.0))
    ),
)


# Formulas in a normal form ------------------------------------------------------------------------------------------

Structure = tuple[Any, ...]
# The structure of a formula, which can be sorted and compared, and the numbers in it, in the order of the structure.
Form = tuple[Structure, tuple[float, ...]]

_COMMUTATIVE = ("maximum", "minimum")
_MOST_STEPS = 16  # operators of a formula, each as often as it is read
_SMALLEST = 1e-99  # magnitude of a number that is raised to a power or divides, else that could overflow
# The operators of formulas, and those that compute the result of one.
_PARTS = {
    *("add", "subtract", "multiply", "divide", "negative", "square", "reciprocal", "absolute", "maximum", "relu"),
    *("exp", "erf", "tanh", "sigmoid", "log1p", "log", "softplus"),
}
_RESULTS = ("add", "multiply", "divide", "reciprocal")


class _NoFormula(Exception):
    """A value is no formula of x."""


class _Normal:
    """The normal form of values as formulas of one of them, x.

    A product is a number and powers of factors, which a quotient, a negative value and a square are too; a sum a set of
    terms; the order of neither counts. x stays whole. Records the values that the formula is made of.
    """

    def __init__(self, x: Node, dtype: str):
        self._x, self._dtype = x, dtype
        self._steps = 0
        self.inner: set[Node] = set()

    def form(self, node: Node) -> Form:
        number, factors = self._product(node)
        if number == 1.0 and list(factors.values()) == [1]:
            return next(iter(factors))
        return _joined("product", [((power, *s), numbers) for (s, numbers), power in factors.items()], number)

    def _product(self, node: Node) -> tuple[float, Counter[Form]]:
        """Return the number and the powers of other factors that a value is the product of."""
        if node is self._x:
            return 1.0, Counter({(("x",), ()): 1})
        number = _number(node, self._dtype)
        if number is not None:
            return number, Counter()
        self._enter(node)
        if node.op == "negative":
            number, factors = self._product(node.inputs[0])
            return -number, factors
        power = _power(node)
        if power is not None:
            number, factors = self._product(node.inputs[0])
            if not _SMALLEST <= abs(number) <= 1 / _SMALLEST:
                raise _NoFormula
            return number**power, Counter({f: power * p for f, p in factors.items()})
        if node.op in ("multiply", "divide"):
            (number, factors), (other, others) = map(self._product, node.inputs)
            sign = 1 if node.op == "multiply" else -1
            if not _SMALLEST <= abs(other) <= 1 / _SMALLEST:
                raise _NoFormula
            for f, p in others.items():
                if factors[f] * sign * p < 0:  # a quotient of a factor by itself is NaN where that is 0 or infinite
                    raise _NoFormula
                factors[f] += sign * p
            return number * other**sign, factors
        return 1.0, Counter({self._other(node): 1})

    def _other(self, node: Node) -> Form:
        if node.op not in ("add", "subtract"):
            parts = [self.form(i) for i in node.inputs]
            return _joined(node.op, sorted(parts) if node.op in _COMMUTATIVE else parts)
        terms: list[Form] = []
        waiting = [(node, 1.0)]
        while waiting:
            value, sign = waiting.pop()
            if value is not node and value.op in ("add", "subtract") and value is not self._x:
                self._enter(value)
            if value.op in ("add", "subtract") and value is not self._x:
                waiting += [(value.inputs[0], sign), (value.inputs[1], sign if value.op == "add" else -sign)]
                continue
            number, factors = self._product(value)
            powers = [((power, *s), numbers) for (s, numbers), power in factors.items()]
            terms.append(_joined("term", powers, sign * number))
        return _joined("sum", sorted(terms))

    def _enter(self, node: Node) -> None:
        self._steps += 1
        fits = node.op in _PARTS and node.dtype == self._dtype and self._steps <= _MOST_STEPS
        if not fits:
            raise _NoFormula
        self.inner.add(node)


def _joined(op: str, parts: list[Form], *numbers: float) -> Form:
    """Make the form of an operator of several parts; those of a product in any order."""
    parts = sorted(parts) if op in ("product", "term") else parts
    return (op, *(s for s, _ in parts)), (*numbers, *(n for _, inner in parts for n in inner))


def _number(node: Node, dtype: str) -> float | None:
    """Return the value of a constant that is part of the formula: a Python number, or one in the formula's dtype."""
    if node.op == "cast" and node.dtype == dtype and node.inputs[0].op == "const":
        node = node.inputs[0]
    is_number = node.op == "const" and not node.name and node.number is None and not isinstance(node.value, complex)
    return float(node.value) if is_number else None


def _power(node: Node) -> int | None:
    """Return n where a value is the n-th power of its first operand."""
    return {"square": 2, "reciprocal": -1}.get(node.op)


@cache
def _table() -> dict[Structure, list[tuple[tuple[float, ...], Identity]]]:
    """Return the identities by the structure of what is written, with the numbers in it."""
    found: dict[Structure, list[tuple[tuple[float, ...], Identity]]] = {}
    x = g.argument(0, "x", (2, 2), "float64")
    for identity in IDENTITIES:
        structure, numbers = _Normal(x, x.dtype).form(identity.written(_Namespace(), _Value(x)).node)
        found.setdefault(structure, []).append((numbers, identity))
    return found


# Recognition --------------------------------------------------------------------------------------------------------

# Each formula has one of these functions, at most `_DEPTH` operators beneath its result, and x at most so many beneath
# the function.
_FUNCTIONS = {"exp": 3, "erf": 2, "sigmoid": 1, "tanh": 4}
_DEPTH = 3
_CANDIDATES = 12  # values of one depth, where functions are looked for

Match = tuple[Identity, Node, set[Node]]


def recognize_activation(node: Node) -> Match | None:
    """Return the identity that a value is written by, x, and the values in between; None for others.

    Exact for ±inf, NaN and zeros. For finite x the operators are as accurate as what is written, or more, as the
    identities say: 1 + erf loses gelu's digits far from zero. Constants have to agree to a rounding of float64 in
    float64, to one of float32 in other dtypes.
    """
    if node.op not in _RESULTS or not dtypes.is_float(node.dtype):
        return None
    for x in _candidates(node):
        normal = _Normal(x, node.dtype)
        try:
            structure, numbers = normal.form(node)
        except _NoFormula:
            continue
        for wanted, identity in _table().get(structure, ()):
            allowed = identity.in_float64 or node.dtype != "float64"
            if allowed and all(_is_close(a, b, node.dtype) for a, b in zip(numbers, wanted, strict=True)):
                return identity, x, normal.inner - {node}
    return None


def _is_close(a: float, b: float, dtype: str) -> bool:
    return a == b or math.isclose(a, b, rel_tol=2.0**-51 if dtype == "float64" else 2.0**-23)


def _candidates(node: Node) -> Iterable[Node]:
    """Return the values that may be the x of a formula: those beneath its functions, the nearest last."""
    functions: dict[Node, int] = {}
    front = [node]
    for _ in range(_DEPTH + 1):
        functions.update((n, _FUNCTIONS[n.op]) for n in front if n.op in _FUNCTIONS)
        front = [i for n in front if n.op in _PARTS for i in n.inputs][:_CANDIDATES]
    found: dict[Node, None] = {}
    for function, depth in functions.items():
        front = [function]
        for _ in range(depth):
            front = list(dict.fromkeys(i for n in front if n.op in _PARTS for i in n.inputs if i.op != "const"))
            found.update(dict.fromkeys(n for n in front if n.dtype == node.dtype))
    return reversed(found)


def recognize_activations(graph: Graph, notes: list[Note]) -> Graph:
    """Apply `recognize_activation`, to the largest formulas first, where nothing else reads the values in between.

    Saves instructions: kernels compute activations with fewer than what they are written with, in 16 bits above all.
    """
    while matches := _find_matches(graph):
        done: dict[Node, Node] = {}
        for node in graph.order:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
            if node in matches:
                identity, x, inner = matches[node]
                done[node] = identity.operator(_Namespace(), _Value(done[x])).node
                notes.append(_note(identity, node, inner))
        graph = graph.replace(done)
    return graph


def _find_matches(graph: Graph) -> dict[Node, Match]:
    """Find formulas that share no operator, from the results on."""
    readers = Counter(graph.roots)
    for node in graph.order:
        readers.update(node.inputs)
    distance: dict[Node, int] = {}  # to the nearest function beneath that nothing else reads
    for node in graph.order:
        near = [distance[i] + 1 for i in node.inputs if i in distance and readers[i] == 1]
        if node.op in _FUNCTIONS:
            distance[node] = 0
        elif node.op in _PARTS and near and min(near) <= _DEPTH:
            distance[node] = min(near)
    found: dict[Node, Match] = {}
    taken: set[Node] = set()
    for node in reversed(graph.order):
        match = recognize_activation(node) if node in distance and node not in taken else None
        if match is not None:
            inner = match[2]
            within = Counter(i for n in (node, *inner) for i in n.inputs)
            if all(within[i] == readers[i] for i in inner):
                found[node] = match
                taken |= inner
    return found


def _note(identity: Identity, node: Node, inner: set[Node]) -> Note:
    formula = [n.op for n in g.topological([node], lambda n: n.inputs if n is node or n in inner else ()) if n in inner]
    what = f"{' -> '.join([*formula, node.op])}, {node.shape[0]} x {node.shape[1]}"
    return Note(identity.text, what, f"{len(inner)} operator{'s' * (len(inner) > 1)}")


def expand_power(node: Node) -> Node:
    """x^2 = x x, x^3 = x x^2 and x^4 = (x^2)^2.

    Holds to a rounding; exact for ±inf, NaN and zeros. Saves the general power, of logarithm and exponential.
    """
    if node.op != "power" or node.inputs[0].dtype != node.dtype:
        return node
    exponent = _number(node.inputs[1], node.dtype)
    if exponent not in (2.0, 3.0, 4.0):
        return node
    square = g.pointwise("square", node.inputs[0])
    if exponent == 2.0:
        return square
    return g.pointwise("square", square) if exponent == 4.0 else g.pointwise("multiply", node.inputs[0], square)
