"""The lines that random programs are made of: each adds a value to a draft, or changes one in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nd_programs import Draft

_UNARY = (
    *("np.tanh({0})", "np.tanh({0})", "np.sin({0})", "np.cos({0})", "np.arctan({0})", "np.exp(-np.abs({0}))"),
    *("np.sqrt(np.abs({0}))", "np.log1p(np.abs({0}))", "-{0}", "np.abs({0})", "np.square({0})", "{0} ** 2"),
    *("np.sign({0})", "np.floor({0} * 2)", "np.maximum({0}, 0)", "np.clip({0}, -0.5, 1.25)", "1 / (1 + {0} * {0})"),
    *("np.reciprocal({0})", "cf.gelu({0})", "cf.relu({0})", "cf.silu({0})", "cf.sigmoid({0})", "np.nan_to_num({0})"),
    *("np.round({0}, 2)", "{0} % 0.7", "np.expm1(np.minimum({0}, 1))", "{0} * 3", "2.5 - {0}", "{0} + 1", "{0} / 7"),
    *("np.zeros_like({0})", "np.ones_like({0})", "{0}.copy()", "np.minimum({0}, 0.5)", "np.exp(np.minimum({0}, 2.0))"),
)
_UNARY_INTEGERS = ("-{0}", "np.abs({0})", "{0} * {0}", "np.sign({0})", "{0} // 3", "{0} % 5", "{0} & 3", "~{0}")
_UNARY_INTEGERS += ("{0} ^ 6", "{0} << 2", "{0} >> 1", "5 << {0}", "7 % {0}")
_UNARY_INTEGERS += ("{0} + 1", "2 * {0}", "{0} / 3", "{0} * 0.5", "np.maximum({0}, 1)", "np.clip({0}, -2, 3)")
_BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "{0} / (1 + np.abs({1}))", "np.maximum({0}, {1})")
_BINARY += ("np.minimum({0}, {1})", "np.logaddexp({0}, {1})", "{0} + {1} * {0}", "np.power(np.abs({0}) + 0.5, {1})")
_COMPARISONS = (">", ">=", "<", "<=", "==", "!=")
_REDUCTIONS = ("sum", "sum", "mean", "max", "min", "prod", "var", "std")
_NORMALISATIONS = (
    *("{0} - {0}.max(axis={1}, keepdims=True)", "{0} - {0}.mean(axis={1}, keepdims=True)"),
    *("{0} / (1 + np.abs({0}).sum(axis={1}, keepdims=True))", "cf.softmax({0}, axis={1})"),
    *("{0} / np.sqrt(1e-5 + (({0} - {0}.mean({1}, keepdims=True)) ** 2).mean({1}, keepdims=True))",),
    *("cf.log_softmax({0}, axis={1})", "{0} - cf.logsumexp({0}, axis={1}, keepdims=True)"),
    *("{0} / {0}.sum(axis={1}, keepdims=True)", "{0} * {0}.min(axis={1}, keepdims=True)"),
)


class _Lines:
    """Methods of a draft; each returns whether it drew a line."""

    def __init__(self, draft: Draft):
        self.d = draft

    def of(self, templates: Any, kinds: str = "f", least: int = 0) -> Any:
        """Draw one of the templates, of a value of these kinds with at least so many dimensions."""
        i = self.d.pick(kinds, least)
        return None if i is None else self.d.emit(self.d.one(templates).format(self.d.names[i]))

    # Elements
    def unary(self) -> Any:
        return self.of(_UNARY)

    def integers(self) -> Any:
        """Compute with integers, or convert to them."""
        d = self.d
        if d.floats_only:
            return None
        if d.chance(0.3):
            i = d.pick("fbi")
            return i is not None and d.emit(f"{d.names[i]}.astype(np.{d.one(['int64', 'int32', 'int8', 'uint8'])})")
        return self.of(_UNARY_INTEGERS, "i")

    def binary(self) -> Any:
        d = self.d
        i = d.pick("f" if d.floats_only or d.chance(0.7) else "fib")
        if i is None:
            return None
        j = d.partner(i, "f" if d.floats_only or d.chance(0.7) else d.one(["i", "b", "fib"]))
        pair = (d.names[i], d.names[j]) if d.chance(0.5) else (d.names[j], d.names[i])
        return d.emit(d.one(_BINARY).format(*pair))

    def integer_pair(self) -> Any:
        d = self.d
        i = d.pick("i")
        if d.floats_only or i is None:
            return None
        templates = (
            "{0} + {1}",
            "{0} - {1}",
            "{0} * {1}",
            "np.maximum({0}, {1})",
            "{0} & {1}",
            "{0} | {1}",
            "{0} ^ {1}",
        )
        return d.emit(d.one(templates).format(d.names[i], d.names[d.partner(i, d.one(["i", "ib"]))]))

    def choice(self) -> Any:
        d = self.d
        i = d.pick("f" if d.floats_only else "fi")
        if i is None:
            return None
        x, y = d.names[i], d.names[d.partner(i)]
        mask = f"{x} {d.one(_COMPARISONS)} {d.one([y, '0.25'])}"
        masks = [n for n, v in zip(d.names, d.values, strict=True) if v.dtype == bool and d.fits(v, d.values[i])]
        if masks and d.chance(0.4):
            mask = d.one(masks)
        elif d.chance(0.3):
            return d.emit(mask)
        return d.emit(f"np.where({mask}, {d.one([x, '0.0', y])}, {d.one([y, '1.0', x])})")

    def logic(self) -> Any:
        d = self.d
        i = d.pick("b")
        if i is None:
            return None
        if d.chance(0.4):
            return d.emit(d.one(["~{0}", "np.logical_not({0})", "{0} * 1.0", "{0} + {0}"]).format(d.names[i]))
        j = d.partner(i, "b")
        return d.emit(
            d.one(["{0} & {1}", "{0} | {1}", "{0} ^ {1}", "np.logical_and({0}, {1})"]).format(d.names[i], d.names[j])
        )

    def conversion(self) -> Any:
        d = self.d
        i = d.pick("fib")
        dtype = d.one(["float32", "float64", "float16", "float64", *d.dtypes])
        text = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"np.{dtype}"
        return i is not None and d.emit(f"{d.names[i]}.astype({text})")

    # Reductions
    def reduction(self) -> Any:
        """Reduce over any axes: sums and extremes, truth, places of extremes, norms."""
        d = self.d
        i = d.pick("f" if d.floats_only or d.chance(0.7) else "fib")
        if i is None:
            return None
        x, axis, keepdims = d.names[i], d.axes(i), d.chance(0.5)
        if d.chance(0.1):
            name = d.one(["any", "all", "count_nonzero"])
            return d.emit(f"np.{name}({x} > 0, axis={axis}, keepdims={keepdims})")
        if d.chance(0.1) and (axis is None or isinstance(axis, int)):
            return d.emit(f"np.{d.one(['argmax', 'argmin'])}({x}, axis={axis}, keepdims={keepdims})")
        if d.chance(0.1) and d.kind(i) == "f":
            return d.emit(f"cf.logsumexp({x}, axis={axis}, keepdims={keepdims})") if d.values[i].ndim else None
        if d.chance(0.1) and d.kind(i) == "f":
            return d.emit(f"np.linalg.norm({x}, axis={axis}, keepdims={keepdims})") if isinstance(axis, int) else None
        name = d.one(_REDUCTIONS)
        more = ", ddof=1" if name in ("var", "std") and d.chance(0.3) else ""
        call = f"np.{name}({x}, " if d.chance(0.5) else f"{x}.{name}("
        return d.emit(f"{call}axis={axis}, keepdims={keepdims}{more})")

    def normalisation(self) -> Any:
        d = self.d
        i = d.pick("f", 1)
        if i is None or not d.values[i].size:
            return None
        return d.emit(d.one(_NORMALISATIONS).format(d.names[i], d.axis(i)))

    # Shapes
    def movement(self) -> Any:
        """Permute, add or drop axes."""
        d = self.d
        i = d.pick("fib")
        if i is None:
            return None
        x, v = d.names[i], d.values[i]
        if not v.ndim:
            return d.emit(d.one([f"{x}[None]", f"np.expand_dims({x}, 0)", f"{x}[..., None, None]"]))
        p, q = d.axis(i), d.axis(i)
        order = tuple(int(k) for k in d.rng.permutation(v.ndim))
        choices = [f"{x}.T", f"{x}.transpose{order}", f"np.swapaxes({x}, {p}, {q})", f"np.moveaxis({x}, {p}, {q})"]
        choices += [f"np.transpose({x}, {order})", f"np.expand_dims({x}, {int(d.rng.integers(0, v.ndim + 1))})"]
        choices += [f"np.squeeze({x})", f"{x}.mT"]
        return d.emit(d.one(choices))

    def reshape(self) -> Any:
        """Merge, split or flatten axes, or broadcast to one more."""
        d = self.d
        i = d.pick("fib")
        if i is None:
            return None
        v = d.values[i]
        factors: list[int] = []
        for n in v.shape:
            factors += [2, n // 2] if n % 2 == 0 and n and d.chance(0.5) else [n]
        shape: list[int] = []
        for n in factors:
            if shape and d.chance(0.5):
                shape[-1] *= n
            else:
                shape.append(n)
        if d.chance(0.2):
            shape.insert(int(d.rng.integers(0, len(shape) + 1)), 1)
        if shape and d.chance(0.3) and v.size:
            shape[int(d.rng.integers(0, len(shape)))] = -1
        x = d.names[i]
        texts = [f"{x}.reshape({tuple(shape)})"] * 3 + [f"{x}.ravel()", f"np.reshape({x}, {tuple(shape)})"]
        texts += [f"{x}.reshape({tuple(shape)}, order='F')"]
        if v.ndim < 4 and v.size < 300:
            texts.append(f"np.broadcast_to({x}, {(d.one(d.sizes), *v.shape)})")
        return d.emit(d.one(texts), [i])

    def part(self) -> Any:
        d = self.d
        i = d.pick("fib", 1)
        return i is not None and d.emit(f"{d.names[i]}[{d.index(d.values[i].shape)}]")

    def labels(self) -> Any:
        """One element of each row, or several."""
        d = self.d
        i = d.pick("f", 1)
        if i is None or not d.values[i].size:
            return None
        x, v, axis = d.names[i], d.values[i], d.axis(i)
        n, dtype = v.shape[axis], d.one(["int64", "int32", "int64"])
        if v.ndim == 2 and d.chance(0.5):
            k = d.names[d.argument(v.shape[:1], dtype, v.shape[1])]
            return d.emit(f"{x}[np.arange({v.shape[0]}), {k}]")
        shape = list(v.shape)
        shape[axis] = 1 if d.chance(0.6) else d.one([2, 3, n])
        if d.chance(0.2):
            return d.emit(f"np.take({x}, {d.names[d.argument((shape[axis],), dtype, n)]}, axis={axis})")
        return d.emit(f"np.take_along_axis({x}, {d.names[d.argument(shape, dtype, n)]}, axis={axis})")

    # Products
    def product(self) -> Any:
        """Multiply a value, by itself or by a new argument: matrices, vectors, batches, `einsum`, `tensordot`."""
        d = self.d
        i = d.pick("f", 1)
        if i is None:
            return None
        x, v = d.names[i], d.values[i]
        if v.dtype.name in ("float16", "bfloat16") and d.chance(0.7):
            return None
        inner, outer, kind = v.shape[-1], d.one(d.sizes), d.rng.random()
        if kind < 0.35:
            return d.emit(f"{x} @ {d.names[d.argument((inner, outer))]}")
        if kind < 0.45:
            return d.emit(f"{x} @ {d.names[d.argument((inner,))]}")
        if kind < 0.55 and v.ndim > 1:
            return d.emit(d.one(["{0} @ {0}.mT", "{0}.mT @ {0}"]).format(x))
        if kind < 0.75 and v.ndim > 2:
            batch = tuple(1 if d.chance(0.3) else n for n in v.shape[:-2])[int(d.chance(0.2)) :]
            if d.chance(0.5):
                return d.emit(f"{x} @ {d.names[d.argument((*batch, inner, outer))]}")
            return d.emit(f"{d.names[d.argument((*batch, outer, inner))]} @ {x}.mT")
        if kind < 0.8 and v.ndim == 1:
            return d.emit(f"np.outer({x}, {d.names[d.argument((outer,))]})")
        if kind < 0.85:
            return d.emit(f"np.dot({x}, {d.names[d.argument((inner, outer) if d.chance(0.7) else (inner,))]})")
        if kind < 0.9:
            return d.emit(f"np.inner({x}, {d.names[d.argument((outer, inner))]})")
        letters = "abcd"[: v.ndim]
        if kind < 0.95 and v.ndim == len(letters) and "bfloat16" not in (v.dtype.name, *d.dtypes):
            other = "".join(c for c in letters if d.chance(0.6))
            sizes = dict(zip(letters, v.shape, strict=True)) | {"z": outer}
            other += "z" * d.chance(0.5)
            kept = "".join(c for c in d.rng.permutation(list(letters + other)) if d.chance(0.6))
            kept = "".join(dict.fromkeys(kept))
            k = d.argument([sizes[c] for c in other])
            return d.emit(f"np.einsum('{letters},{other}->{kept}', {x}, {d.names[k]})")
        if v.ndim > 1:
            axes = d.one([1, 2])
            return d.emit(f"np.tensordot({x}, {d.names[d.argument((*v.shape[v.ndim - axes :], outer))]}, {axes})")
        return None

    # Library steps
    def joined(self) -> Any:
        """Join, pad, shift, split, flip or repeat: what runs as a library step, or as copies of parts."""
        d = self.d
        i = d.pick("f" if d.floats_only else "fib", 1)
        if i is None:
            return None
        x, v, axis = d.names[i], d.values[i], d.axis(i)
        same = [n for n, o in zip(d.names, d.values, strict=True) if o.shape == v.shape and o.dtype == v.dtype]
        y = d.one(same)
        width = [(int(d.rng.integers(0, 3)), int(d.rng.integers(0, 3))) for _ in v.shape]
        texts = [
            f"np.concatenate([{x}, {y}], axis={axis})",
            f"np.stack([{x}, {y}], axis={axis})",
            f"np.pad({x}, {width})",
        ]
        texts += [f"np.roll({x}, {int(d.rng.integers(-3, 4))}, axis={axis})", f"np.roll({x}, 1)"]
        texts += [f"np.split({x}, [{int(d.rng.integers(0, v.shape[axis] + 1))}], axis={axis})[{d.one([0, 1])}]"]
        texts += [f"np.flip({x}, {axis})", f"np.flip({x})", f"np.repeat({x}, 2, axis={axis})", f"np.tile({x}, 2)"]
        texts += [f"np.tril({x})", f"np.triu({x}, 1)"] if v.ndim > 1 else []
        texts += [f"np.diagonal({x})", f"np.rot90({x}, {d.one([1, 2, 3])})"] if v.ndim > 1 else []
        texts += [f"np.trace({x})"] if v.ndim == 2 else []
        return d.emit(d.one(texts))

    def library(self) -> Any:
        """Sort, sum cumulatively, take differences or medians."""
        d = self.d
        i = d.pick("f" if d.floats_only else "fi", 1)
        if i is None or not d.values[i].size or d.values[i].dtype.name == "bfloat16":
            return None
        x, axis = d.names[i], d.axis(i)
        texts = [f"np.sort({x}, axis={axis})", f"np.cumsum({x}, axis={axis})", f"np.diff({x}, axis={axis})"]
        texts += [f"np.median({x}, axis={axis})"] if d.values[i].dtype.name != "float16" else []
        return d.emit(d.one(texts))

    # Changes in place
    def target(self, kinds: str, least: int = 0) -> int | None:
        """An array that can be changed: an argument seldom, since the caller sees it."""
        d = self.d
        found = []
        for i, v in enumerate(d.values):
            if isinstance(v, np.ndarray) and d.kind(i) in kinds and v.ndim >= least and v.flags.writeable:
                from nd_programs import root

                if root(v) not in d.frozen and (d.names[i] not in d.given or d.chance(0.1)):
                    found.append(i)
        return int(d.one(found[-6:])) if found else None

    def assignment(self) -> Any:
        """Assign a number or a value to a part of an array, or change the part in place."""
        d = self.d
        i = self.target("f" if d.floats_only else "fi", 1)
        if i is None:
            return None
        x, v = d.names[i], d.values[i]
        index = d.index(v.shape)
        part = eval(f"x[{index}]", {"x": v})
        way = d.rng.random()
        if way < 0.25:
            return d.change(f"{x}[{index}] = {d.one(['2.0', '0', '-1'])}")
        if way < 0.5 and np.ndim(part):
            return d.change(f"{x}[{index}] {d.one(['*=', '+=', '-='])} {d.one(['2', '3', '-1'])}")
        fitting = [n for n, o in zip(d.names, d.values, strict=True) if d.fits(o, part) and self.within(o, part)]
        fitting = [n for n in fitting if d.kind(d.names.index(n)) in ("fib" if d.kind(i) == "f" else "i")]
        if not fitting or d.chance(0.3):
            dtype = "" if d.kind(i) == "f" else v.dtype.name
            fitting = [d.names[d.argument([1 if d.chance(0.3) else n for n in np.shape(part)], dtype)]]
        y = d.one(fitting[-8:])
        return d.change(f"{x}[{index}] {d.one(['=', '=', '+=', '*=']) if np.ndim(part) else '='} {y}")

    def within(self, value: Any, part: Any) -> bool:
        """Whether a value broadcasts to the shape of a part."""
        return np.broadcast_shapes(np.shape(value), np.shape(part)) == np.shape(part)

    def in_place(self) -> Any:
        """Change a whole array in place, by a number or a value that broadcasts to it."""
        d = self.d
        i = self.target("f" if d.floats_only else "fi")
        if i is None:
            return None
        x, v = d.names[i], d.values[i]
        if d.chance(0.3):
            return d.change(f"{x} {d.one(['*=', '+=', '-='])} {d.one(['2', '3', '-1'])}")
        fitting = [n for n, o in zip(d.names, d.values, strict=True) if d.fits(o, v) and self.within(o, v)]
        fitting = [n for n in fitting if d.kind(d.names.index(n)) == d.kind(i)]
        return bool(fitting) and d.change(f"{x} {d.one(['+=', '*=', '-='])} {d.one(fitting[-8:])}")

    def masked(self) -> Any:
        """Change the elements that a mask selects in place, or reduce them."""
        d = self.d
        i = self.target("f", 1)
        if i is None:
            return None
        x, number = d.names[i], d.one(["0", "0.5", "-0.5"])
        mask = f"{x} {d.one(['>', '<', '<='])} {number}"
        bools = [
            n
            for n, v in zip(d.names, d.values, strict=True)
            if v.dtype == bool and v.ndim and v.shape == d.values[i].shape[: v.ndim]
        ]
        if bools and d.chance(0.5):
            mask = d.one(bools)
        if d.chance(0.3):
            return d.emit(f"{x}[{mask}].{d.one(['sum', 'sum', 'mean'])}()")
        return d.change(f"{x}[{mask}] {d.one(['=', '*=', '+=', '='])} {d.one(['-1.0', '0.5', '2'])}")


_WEIGHTS = {
    **{"unary": 5, "integers": 2, "binary": 6, "integer_pair": 1, "choice": 2, "logic": 1, "conversion": 1},
    **{"reduction": 4, "normalisation": 4, "movement": 4, "reshape": 3, "part": 4, "labels": 1, "product": 3},
    **{"joined": 2, "library": 1, "assignment": 3, "in_place": 3, "masked": 1},
}


def lines_of(draft: Draft) -> list[Callable[[], Any]]:
    """The methods that draw lines, each as often as it is likely."""
    lines = _Lines(draft)
    return [getattr(lines, name) for name, weight in _WEIGHTS.items() for _ in range(weight)]
