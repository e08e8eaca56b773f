"""Random chains: functions drawn as source text together with what they should give (`bounds.Value`).

A `Builder` holds the values that exist so far. Each of its methods draws one more line of a function, from the whole
language that the tracer knows, and evaluates it with bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import bounds
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
from bounds import Value
from language import ACTIVATIONS, BINARY, COMPARISONS, REDUCTIONS, UNARY
from support import SPECIALS, assert_equal, dtype_of, info, unit

import cupyfuse as cf

SIZES = (1, 2, 3, 5, 7, 13, 31, 40, 67)
# Of one of the dimensions: around warps, vectors and blocks.
WIDE = (32, 33, 64, 127, 128, 129, 257, 1023, 1024, 1025)


def extremes(dtype: str) -> list[float]:
    """The largest numbers of a type, the smallest ones, and some that are huge or tiny."""
    limits = info(dtype)
    top, normal, least = (float(n) for n in (limits.max, limits.smallest_normal, limits.smallest_subnormal))
    return [top, -top, top / 3, normal, -normal, 0.7 * normal, least, -3 * least, top**0.5, normal**0.5]


def _count_along(x: Value, axis: int | None) -> int:
    return x.v.size if axis is None else x.shape[axis]


class Builder:
    """A function under construction."""

    def __init__(self, draw: Callable[..., Any], dtypes: Sequence[str], mixed: bool, sizes: Sequence[int]):
        self.draw = draw
        self.dtypes = dtypes if mixed else [draw(st.sampled_from(dtypes))]
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.sizes = [draw(st.sampled_from(sizes)) for _ in range(3)]
        if sizes is SIZES and draw(st.integers(0, 3)) == 0:
            self.sizes[draw(st.integers(0, 2))] = draw(st.sampled_from(WIDE))
        self.share = draw(st.sampled_from((0.0, 0.0, 0.02)))
        self.extreme = draw(st.integers(0, 3)) == 0
        self.values: list[Value] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.lines: list[str] = []
        self.changed: dict[int, None] = {}
        self.outputs: list[int] = []
        self.in_memory: set[int] = set()  # rounded to their own dtype for all who read them
        self.viewed: set[int] = set()  # or views themselves: not to be changed in place
        for shape in draw(st.lists(st.sampled_from(self._shapes()), min_size=2, max_size=6)):
            self.argument(shape)

    def _shapes(self) -> list[tuple[int, ...]]:
        r, c, k = self.sizes
        return [(r, c), (r, c), (r, k), (c, k), (k, c), (c,), (r, 1), (1, c), (r,), (1,), ()]

    def argument(self, shape: tuple[int, ...]) -> None:
        """Draw an argument of a shape."""
        scale = self.draw(st.sampled_from((1.0, 1.0, 0.1, 8.0)))
        array = self.rng.standard_normal(shape) * scale
        dtype = self.draw(st.sampled_from(self.dtypes))
        specials = [*SPECIALS, *extremes(dtype)] if self.extreme else SPECIALS
        if self.share:
            array = np.where(self.rng.random(shape) < self.share, self.rng.choice(specials, shape), array)
        array = np.asarray(array).astype(dtype_of(dtype))
        self.arrays.append(array)
        self.in_memory.add(len(self.values))
        self.values.append(bounds.exact(array, dtype))

    def keep(self, value: Value, text: str) -> bool:
        """One more line, unless its result has more than two long dimensions."""
        if sum(n != 1 for n in value.shape) > 2 or value.ndim > 3:
            return False
        position = len(self.values)
        twins = self.twins(value)
        if any(i in self.in_memory for i in twins):
            value = value.stored()
            self.in_memory.add(position)
        if not twins and self.draw(st.integers(0, 4)) == 0:
            self.outputs.append(position)
            value = value.stored()
            self.in_memory.add(position)
        self.values.append(value)
        self.lines.append(f"v{position} = {text}")
        return True

    def twins(self, value: Value) -> list[int]:
        """Earlier 16-bit values of the same elements, which may be one value with this in a plan: if one of them is a
        result, and so rounded to its dtype, all are."""
        if value.dtype not in ("float16", "bfloat16"):
            return []
        v = value.v.ravel()
        same = (i for i, o in enumerate(self.values) if o.dtype == value.dtype and o.v.size == v.size)
        return [i for i in same if np.array_equal(self.values[i].v.ravel(), v, equal_nan=True)]

    def promoted(self, *positions: int) -> str:
        names = {self.values[i].dtype for i in positions}
        if names == {"float16", "bfloat16"}:  # NumPy refuses this pair
            return "float32"
        return str(np.result_type(*map(dtype_of, names)).name)

    # Drawing operands
    def floats(self) -> list[int]:
        return [i for i, v in enumerate(self.values) if v.dtype != "bool"]

    def masks(self) -> list[int]:
        return [i for i, v in enumerate(self.values) if v.dtype == "bool"]

    def pick(self, choices: Sequence[int]) -> int:
        """One of some values; the latest is the likeliest, so that chains are chains."""
        if self.draw(st.integers(0, 2)):
            return choices[-1]
        return self.draw(st.sampled_from(choices))  # type: ignore[no-any-return]

    def _fit(self, *positions: int) -> bool:
        try:
            shape = np.broadcast_shapes(*(self.values[i].shape for i in positions))
        except ValueError:
            return False
        return sum(n != 1 for n in shape) <= 2 and len(shape) <= 3

    def partner(self, choices: Sequence[int], *others: int) -> int | None:
        """A value that can be broadcast together with others."""
        fitting = [i for i in choices if self._fit(*others, i)]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    # The language
    def unary(self) -> bool:
        i = self.pick(self.floats())
        name = self.draw(st.sampled_from(UNARY))
        return self.keep(bounds.pointwise(name, self.values[i], dtype=self.values[i].dtype), f"np.{name}(v{i})")

    def activation(self) -> bool:
        i = self.pick(self.floats())
        name = self.draw(st.sampled_from(sorted(ACTIVATIONS)))
        text, numbers = ACTIVATIONS[name]
        x = self.values[i]
        constants = [bounds.constant(n, x.dtype) for n in numbers]
        return self.keep(bounds.pointwise(name, x, *constants, dtype=x.dtype), text.format(f"v{i}"))

    def binary(self) -> bool:
        i = self.pick(self.floats())
        j = self.partner(self.floats(), i)
        i, j = (i, j) if self.draw(st.booleans()) else (j, i)
        name = self.draw(st.sampled_from(("add", "subtract", "multiply", *BINARY)))
        value = bounds.pointwise(name, self.values[i], self.values[j], dtype=self.promoted(i, j))
        return self.keep(value, BINARY[name].format(f"v{i}", f"v{j}"))

    def with_number(self) -> bool:
        i = self.pick(self.floats())
        number = self.draw(st.sampled_from((2.0, -0.5, 3.0, 0.1, 1)))
        name = self.draw(st.sampled_from(("add", "subtract", "multiply", "divide", "maximum", "minimum")))
        pair = [(self.values[i], f"v{i}"), (bounds.constant(number, self.values[i].dtype), repr(number))]
        pair = pair if self.draw(st.booleans()) else pair[::-1]
        value = bounds.pointwise(name, pair[0][0], pair[1][0], dtype=self.values[i].dtype)
        return self.keep(value, BINARY[name].format(pair[0][1], pair[1][1]))

    def comparison(self) -> bool:
        i = self.pick(self.floats())
        j = self.partner(self.floats(), i)
        name = self.draw(st.sampled_from(sorted(COMPARISONS)))
        value = bounds.pointwise(name, self.values[i], self.values[j], dtype="bool")
        return self.keep(value, f"v{i} {COMPARISONS[name]} v{j}")

    def choice(self) -> bool:
        """Choose by a mask."""
        if not self.masks():
            return self.comparison()
        c = self.draw(st.sampled_from(self.masks()))
        i = self.partner(self.floats(), c)
        j = None if i is None else self.partner(self.floats(), c, i)
        if i is None or j is None:
            return False
        operands = (self.values[k] for k in (c, i, j))
        value = bounds.pointwise("where", *operands, dtype=self.promoted(i, j))
        return self.keep(value, f"np.where(v{c}, v{i}, v{j})")

    def logic(self) -> bool:
        if not self.masks():
            return self.comparison()
        i = self.draw(st.sampled_from(self.masks()))
        j = self.partner(self.masks(), i)
        name, text = self.draw(st.sampled_from((("logical_and", "v{} & v{}"), ("logical_or", "v{} | v{}"))))
        return self.keep(bounds.pointwise(name, self.values[i], self.values[j], dtype="bool"), text.format(i, j))

    def reduction(self) -> bool:
        """Reduce along one axis or over all."""
        i = self.pick(self.floats())
        x = self.values[i]
        axis = self.draw(st.sampled_from((None, *range(-x.ndim, x.ndim), *((x.ndim - 1,) * 2 if x.ndim else ()))))
        keepdims = self.draw(st.booleans())
        name = self.draw(st.sampled_from(("sum", *sorted(REDUCTIONS))))
        if not _count_along(x, axis) and name not in ("sum", "prod"):
            return False
        value = REDUCTIONS[name](x, axis)
        if not keepdims:
            value = value.view(lambda a: a.reshape(()) if axis is None else np.squeeze(a, axis))
        elif name == "logsumexp" and not x.ndim:
            value = value.view(lambda a: a.reshape(1))  # as SciPy's does
            self.viewed.add(len(self.values))
        call = f"cf.{name}(v{i}, " if name == "logsumexp" else f"v{i}.{name}("
        return self.keep(value, f"{call}axis={axis}, keepdims={keepdims})")

    def normalisation(self) -> bool:
        """Apply softmax or log_softmax along an axis."""
        wide = [i for i in self.floats() if self.values[i].ndim]
        if not wide:
            return False
        i = self.pick(wide)
        axis = self.draw(st.sampled_from((-1, -1, 0)))
        if not _count_along(self.values[i], axis):
            return False
        name = self.draw(st.sampled_from(("softmax", "log_softmax")))
        value = getattr(bounds, name)(self.values[i], axis)
        return self.keep(value, f"cf.{name}(v{i}, axis={axis})")

    def product(self) -> bool:
        """Multiply two matrices that fit, one of them perhaps transposed."""
        # The operands of a product lie in memory, in their own dtype: 16-bit ones are rounded for all who read them.
        matrices = [i for i in self.floats() if self.values[i].ndim == 2]
        matrices = [i for i in matrices if i in self.in_memory or self.values[i].dtype in ("float32", "float64")]
        if not matrices:
            return False
        i = self.pick(matrices)
        pairs = []
        for j in matrices:
            if self.values[j].shape[0] == self.values[i].shape[1]:
                pairs.append((j, ""))
            if self.values[j].shape[1] == self.values[i].shape[1]:
                pairs.append((j, ".T"))
        j, transposed = self.draw(st.sampled_from(pairs))
        right = self.values[j].view(np.transpose) if transposed else self.values[j]
        self.viewed |= {j} if transposed else set()
        return self.keep(bounds.matmul(self.values[i], right, self.promoted(i, j)), f"v{i} @ v{j}{transposed}")

    def linear_tail(self) -> bool:
        """A product and what the algebra looks for after one: column-wise multiply-adds, and a sum."""
        if not self.product():
            return False
        columns = self.values[-1].shape[1]
        for _ in range(self.draw(st.integers(0, 4))):
            i = len(self.values) - 1
            rows = [j for j in self.floats() if self.values[j].shape in ((columns,), (1, columns), (), (1,), (1, 1))]
            fitting = rows or [j for j in self.floats() if self._fit(i, j)]
            j = self.draw(st.sampled_from(fitting))
            name = self.draw(st.sampled_from(("add", "subtract", "multiply", "divide")))
            if self.values[j].ndim > 2 or not self.keep(
                bounds.pointwise(name, self.values[i], self.values[j], dtype=self.promoted(i, j)),
                BINARY[name].format(f"v{i}", f"v{j}"),
            ):
                return False
        i, x = len(self.values) - 1, self.values[-1]
        if x.ndim != 2 or not self.draw(st.booleans()):
            return False
        name = self.draw(st.sampled_from(("sum", "mean", "pool")))
        if name == "pool":
            return self.pool()
        return self.keep(REDUCTIONS[name](x, 1), f"v{i}.{name}(axis=1, keepdims=True)")

    def pool(self) -> bool:
        """Means of neighbouring columns; those of a product may be infinite where as written they are NaN."""
        wide = [i for i in self.floats() if self.values[i].ndim == 2 and min(self.values[i].shape) > 0]
        if not wide:
            return False
        i = self.pick(wide)
        x = self.values[i]
        rows, columns = x.shape
        width = self.draw(st.sampled_from([k for k in range(1, columns + 1) if columns % k == 0]))
        mean = bounds.mean(x.view(lambda a: a.reshape(-1, width)), 1)
        e = np.where(np.isfinite(mean.v), mean.e, np.inf)
        if x.dtype in ("float16", "bfloat16"):  # pooled weights are rounded to the dtype that the product reads
            e = e + mean.m * unit(x.dtype)
        value = Value(mean.v, e, mean.m, x.dtype).view(lambda a: a.reshape(rows, -1))
        return self.keep(value, f"cf.avg_pool1d(v{i}, {width})")

    def arrangement(self) -> bool:
        """Take a view: transposed, reshaped, squeezed, or with a new axis."""
        i = self.pick(range(len(self.values)))
        x = self.values[i]
        options: list[tuple[str, Callable[[Any], Any]]] = [
            (f"v{i}.T", np.transpose),
            (f"v{i}.reshape(-1)", lambda a: a.reshape(-1)),
            (f"np.squeeze(v{i})", np.squeeze),
            (f"v{i}[None, ...]", lambda a: a[None, ...]),
            (f"v{i}[..., None]", lambda a: a[..., None]),
        ]
        if x.ndim == 2:
            options.append((f"v{i}.reshape({x.shape[1]}, {x.shape[0]})", lambda a: a.reshape(x.shape[::-1])))
        text, change = self.draw(st.sampled_from(options))
        self.viewed |= {i, len(self.values)}
        return self.keep(x.view(change), text)

    def conversion(self) -> bool:
        i = self.pick(range(len(self.values)))
        dtype = self.draw(st.sampled_from(self.dtypes))
        name = {"bfloat16": "ml_dtypes.bfloat16"}.get(dtype, f"np.{dtype}")
        return self.keep(bounds.cast(self.values[i], dtype), f"v{i}.astype({name})")

    def in_place(self) -> bool:
        """A change of a value, or of an argument, which the caller then sees."""
        targets = [i for i in self.floats() if i not in self.viewed]
        if not targets:
            return False
        i = self.draw(st.sampled_from(targets))
        j = self.draw(st.sampled_from([j for j in self.floats() if self._fit(i, j)]))
        if np.broadcast_shapes(self.values[i].shape, self.values[j].shape) != self.values[i].shape:
            return False
        if self.promoted(i, j) != self.values[i].dtype:
            return False
        name, symbol = self.draw(st.sampled_from((("add", "+"), ("multiply", "*"), ("divide", "/"))))
        value = bounds.pointwise(name, self.values[i], self.values[j], dtype=self.values[i].dtype)
        self.values[i] = value.stored()
        self.lines.append(f"v{i} {symbol}= v{j}")
        if i < len(self.arrays):
            self.changed[i] = None
        return True

    def line(self) -> None:
        makers = [self.unary, self.activation, self.binary, self.binary, self.with_number, self.comparison, self.choice]
        makers += [self.logic, self.reduction, self.reduction, self.normalisation, self.product, self.product]
        makers += [self.arrangement, self.linear_tail, self.linear_tail, self.conversion, self.in_place, self.pool]
        self.draw(st.sampled_from(makers))()


class Chain:
    """A drawn function, its arguments and what it should give.

    `outputs` and `expected` are the results, `changed` maps the arguments that it changes in place to their new values.
    """

    def __init__(self, builder: Builder):
        self.arrays = builder.arrays
        first, last = len(builder.arrays), len(builder.values) - 1
        if not builder.outputs and builder.values[last].dtype in ("float16", "bfloat16"):
            builder.values.append(bounds.cast(builder.values[last], "float64"))
            builder.lines.append(f"v{last + 1} = v{last}.astype(np.float64)")
        wide = builder.values[-1].dtype not in ("float16", "bfloat16")
        outputs = dict.fromkeys([*builder.outputs, *([len(builder.values) - 1] if wide else [])])
        self.outputs = [i for i in outputs if i >= first]
        self.expected = [builder.values[i] for i in self.outputs]
        self.changed = {i: builder.values[i] for i in builder.changed}
        self.names = [f"v{i}" for i in range(first)]
        returned = ", ".join(f"v{i}" for i in self.outputs)
        body = [*builder.lines, f"return {returned}{',' if len(self.outputs) == 1 else ''}"]
        self.source = "\n".join([f"def chain({', '.join(self.names)}):", *(f"    {line}" for line in body)])
        scope: dict[str, Any] = {"np": np, "cf": cf, "ml_dtypes": ml_dtypes}
        exec(self.source, scope)
        self.function: Callable[..., Any] = scope["chain"]

    def __repr__(self) -> str:
        arguments = ", ".join(f"v{i} {a.dtype}{list(a.shape)}" for i, a in enumerate(self.arrays))
        return f"# {arguments}\n{self.source}"

    def check(self, results: Sequence[Any], arguments: Sequence[Any] = ()) -> None:
        """Assert that results, and arguments after the call, are what they should be."""
        __tracebackhide__ = True
        for i, result, value in zip(self.outputs, results, self.expected, strict=True):
            bounds.check(np.asarray(result), value, f"v{i}")
        for i, (argument, before) in enumerate(zip(arguments, self.arrays, strict=False)):
            if i in self.changed:
                bounds.check(np.asarray(argument), self.changed[i], f"argument v{i}, changed in place,")
            else:
                assert_equal(argument, before)


@st.composite
def chains(
    draw: Callable[..., Any],
    dtypes: Sequence[str],
    mixed: bool = False,
    sizes: Sequence[int] = SIZES,
    longest: int = 9,
) -> Chain:
    """Draw a chain; with `mixed`, each argument has a dtype of its own."""
    builder = Builder(draw, dtypes, mixed, sizes)
    first = len(builder.values)
    for _ in range(draw(st.integers(3, longest))):
        builder.line()
    if len(builder.values) == first:
        builder.unary()
    return Chain(builder)
