"""Random programs on arrays of any number of dimensions, written with NumPy: each runs plain, and fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Step = Callable[[Any, list[Any]], Any]
Array = np.ndarray[Any, Any]


class Program:
    """A chain of random operations on the first argument; others are drawn as operands of it."""

    def __init__(self, rng: np.random.Generator, length: int, dtype: str = "float64", sizes: tuple[int, ...] = ()):
        self.rng, self.dtype = rng, dtype
        self.sizes = sizes or (1, 2, 3, 4, 5)
        shape = tuple(rng.choice(self.sizes, rng.integers(0, 5)))
        self.arguments: list[Array] = []
        self.steps: list[Step] = []
        self.names: list[str] = []
        value = self.draw(shape)
        for _ in range(length):
            name = str(rng.choice(STEPS))
            step = getattr(self, name)(value)
            if step is None:
                continue
            result = np.asarray(step(value, self.arguments))
            if result.size > 4000:
                continue
            value = result
            self.steps.append(step)
            self.names.append(f"{name} -> {value.shape}")

    def draw(self, shape: tuple[int, ...]) -> Array:
        self.arguments.append(self.rng.standard_normal(shape).astype(self.dtype))
        return self.arguments[-1]

    def operand(self, shape: tuple[int, ...]) -> int:
        self.draw(shape)
        return len(self.arguments) - 1

    def __call__(self, *arguments: Any) -> Any:
        x = arguments[0] * 1.0
        for step in self.steps:
            x = step(x, list(arguments))
        return x

    def __str__(self) -> str:
        return f"{[a.shape for a in self.arguments]}: {', '.join(self.names)}"

    # Each returns a step for a value of this shape, or None where there is none.
    def pointwise(self, x: Array) -> Step | None:
        name = str(self.rng.choice(["tanh", "sin", "arctan"]))
        return lambda x, a: getattr(np, name)(x)

    def binary(self, x: Array) -> Step | None:
        """An operand of length one, or missing, along some axes; or one of more dimensions."""
        shape = tuple(1 if self.rng.random() < 0.4 else n for n in x.shape)
        if self.rng.random() < 0.3:
            shape = shape[int(self.rng.integers(0, x.ndim + 1)) :]
        elif x.ndim < 4 and self.rng.random() < 0.3:
            shape = (int(self.rng.choice(self.sizes)), *shape)
        k = self.operand(shape)
        if self.rng.random() < 0.3:
            return lambda x, a: np.where(a[k] > x, a[k], x)
        return lambda x, a: a[k] + x if k % 2 else x * a[k]

    def reduction(self, x: Array) -> Step | None:
        axes = tuple(int(p) for p in range(x.ndim) if self.rng.random() < 0.4)
        axis: Any = axes[0] if len(axes) == 1 else axes or None
        names = ["sum", "mean", "var", "prod"] + ["max", "min"] * (x.size > 0)
        name, keepdims = str(self.rng.choice(names)), bool(self.rng.random() < 0.5)
        return lambda x, a: getattr(np, name)(x, axis=axis, keepdims=keepdims)

    def normalisation(self, x: Array) -> Step | None:
        if not x.ndim or not x.size:
            return None
        axis = int(self.rng.integers(-x.ndim, x.ndim))
        return lambda x, a: x - x.max(axis=axis, keepdims=True) / (1.0 + (x * x).mean(axis=axis, keepdims=True))

    def permutation(self, x: Array) -> Step | None:
        order = tuple(int(p) for p in self.rng.permutation(x.ndim))
        return lambda x, a: x.transpose(order)

    def movement(self, x: Array) -> Step | None:
        if not x.ndim:
            return None
        p, q = (int(n) for n in self.rng.integers(-x.ndim, x.ndim, 2))
        name = str(self.rng.choice(["swapaxes", "moveaxis"]))
        return lambda x, a: getattr(np, name)(x, p, q)

    def reshape(self, x: Array) -> Step | None:
        factors: list[int] = []
        for n in x.shape:
            factors += [2, n // 2] if n % 2 == 0 and n and self.rng.random() < 0.5 else [n]
        shape: list[int] = []
        for n in factors:
            if shape and self.rng.random() < 0.5:
                shape[-1] *= n
            else:
                shape.append(n)
        if self.rng.random() < 0.2:
            shape.insert(int(self.rng.integers(0, len(shape) + 1)), 1)
        return lambda x, a: x.reshape(shape)

    def indices(self, x: Array) -> tuple[Any, ...]:
        """An index of slices, integers, new axes and an ellipsis."""
        items: list[Any] = []
        for n in x.shape:
            kind = self.rng.random()
            if kind < 0.2 and n:
                items.append(int(self.rng.integers(-n, n)))
            elif kind < 0.5:
                items.append(slice(None))
            else:
                ends = [None if self.rng.random() < 0.3 else int(self.rng.integers(-n - 1, n + 2)) for _ in "ab"]
                items.append(slice(*ends, self.rng.choice([None, 1, 2, 3, -1, -2])))
        if self.rng.random() < 0.2:
            items.insert(int(self.rng.integers(0, len(items) + 1)), None)
        if items and self.rng.random() < 0.2:
            items[-1] = Ellipsis
        return tuple(items)

    def part(self, x: Array) -> Step | None:
        index = self.indices(x)
        return lambda x, a: x[index] * 1.0

    def assignment(self, x: Array) -> Step | None:
        index = self.indices(x)
        shape = np.asarray(x[index]).shape
        k = self.operand(tuple(1 if self.rng.random() < 0.3 else n for n in shape))
        way = self.rng.random()

        def step(x: Any, a: list[Any]) -> Any:
            y = x.copy() if hasattr(x, "copy") and x.ndim else x * 1.0 + np.zeros_like(x)
            if way < 0.3:
                y[index] = 2.0
            elif way < 0.5:
                y[index] *= 3.0
            else:
                y[index] = a[k]
            return y

        return step if x.ndim else None

    def masked(self, x: Array) -> Step | None:
        number = float(self.rng.standard_normal())

        def step(x: Any, a: list[Any]) -> Any:
            y = x.copy()
            y[y > number] *= -1.0
            return y + x[x < number].sum()

        return step if x.ndim else None

    def view(self, x: Array) -> Step | None:
        """A view that follows, or makes, a change in place."""
        if not x.ndim:
            return None
        index = self.indices(x)
        first = bool(self.rng.random() < 0.5)

        def step(x: Any, a: list[Any]) -> Any:
            y = x.copy()
            z = y[index]
            if first:
                y *= 2.0
            elif np.ndim(z):
                z += 1.0
            return y + np.sum(z)

        return step

    def new_axis(self, x: Array) -> Step | None:
        if x.ndim > 4:
            return None
        axis = int(self.rng.integers(0, x.ndim + 1))
        return lambda x, a: np.expand_dims(x, axis)

    def product(self, x: Array) -> Step | None:
        if not x.ndim:
            return None
        k = self.operand((x.shape[-1], int(self.rng.choice(self.sizes))))
        return lambda x, a: x @ a[k]

    def batched_product(self, x: Array) -> Step | None:
        if x.ndim < 3:
            return None
        batch = tuple(1 if self.rng.random() < 0.3 else n for n in x.shape[:-2])
        if self.rng.random() < 0.5:
            k = self.operand((*batch, x.shape[-1], int(self.rng.choice(self.sizes))))
            return lambda x, a: x @ a[k]
        k = self.operand((*batch, int(self.rng.choice(self.sizes)), x.shape[-1]))
        return lambda x, a: np.tanh(a[k]) @ x.swapaxes(-1, -2)


STEPS = (
    *("pointwise", "binary", "binary", "reduction", "normalisation", "permutation", "movement", "reshape"),
    *("new_axis", "product", "batched_product", "part", "part", "assignment", "masked", "view"),
)
