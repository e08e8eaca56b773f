"""Both passes of a chain as the engines run them, and as PyTorch does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from support import HOST

import cupyfuse as cf
from cupyfuse.engines import cuda, row_blocks
from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.ir import graph as g
from cupyfuse.ir.graph import Graph, Node
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.traced import Traced
from cupyfuse.settings import Settings
from cupyfuse.trace.autodiff import gradients
from cupyfuse.trace.saved import extract_graph, saved_values, stored

Arrays = list[np.ndarray[Any, Any]]


# A chain's two passes ------------------------------------------------------------------------------------------------


class Passes:
    """The forward and the backward plan of a function of arrays, as the engines run them."""

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[Any],
        wanted: Sequence[int] | None = None,
        settings: Settings = Settings(),  # noqa: B008
        products: bool = True,
    ):
        traced = cf.fuse(function).trace(tuple(examples))
        graph = traced.graph
        self.outputs, self.axes = graph.outputs, tuple(axes.labels for axes in traced.axes)
        self.wanted = range(len(graph.inputs)) if wanted is None else wanted
        cotangents = [g.argument(0, "c", n.shape, n.dtype) for n in self.outputs]
        found = gradients(self.outputs, cotangents, [graph.inputs[k] for k in self.wanted])
        self.given = [node is not None for node in found]
        roots = [node for node in found if node is not None]
        self.saved = saved_values(graph.roots, roots, products)
        self.forward = build(
            Traced(
                traced.name,
                Graph(graph.inputs, [*self.outputs, *map(stored, self.saved)], graph.effects),
                (*traced.axes, *((0, 1) for _ in self.saved)),
                traced.calls,
            ),
            settings=settings,
        )
        leaves = [(n, n.name) for n in graph.inputs]
        leaves += [(stored(n), f"saved{k}") for k, n in enumerate(self.saved)]
        leaves += [(n, f"cotangent{k}") for k, n in enumerate(cotangents)]
        ndims = [graph.inputs[k].ndim for k, there in zip(self.wanted, self.given, strict=True) if there]
        axes = tuple(((), (1,), (0, 1))[n] for n in ndims)
        self.backward = build(Traced("backward", extract_graph(roots, leaves), axes, ()), settings=settings)

    def __call__(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], engine: str = "numpy"
    ) -> tuple[Arrays, list[Any]]:
        """The results, and the gradients of what is wanted (None where nothing depends on it)."""
        originals = [np.copy(a) for a in arrays]  # a running mean changes in place
        results = execute(self.forward, originals, engine)
        outputs, saved = results[: len(self.outputs)], results[len(self.outputs) :]
        nodes = [as_node(c, n, a) for c, n, a in zip(cotangents, self.outputs, self.axes, strict=True)]
        found = iter(execute(self.backward, [*arrays, *saved, *nodes], engine))
        return outputs, [next(found) if there else None for there in self.given]


def as_node(cotangent: np.ndarray[Any, Any], node: Node, axes: Any) -> np.ndarray[Any, Any]:
    """A cotangent of a result as the result's node lies."""
    if [a for a in axes if a is not None] == [1, 0]:
        kept = [n for n, a in zip(cotangent.shape, axes, strict=True) if a is not None]
        return np.ascontiguousarray(cotangent.reshape(kept).T)
    return cotangent.reshape(node.shape)


def execute(plan: Plan, arrays: Sequence[Any], engine: str) -> Arrays:
    if engine == "numpy":
        return list(row_blocks.load(NumpyExecutable, plan, arrays)(arrays, [None] * len(plan.outputs)))
    with HOST.active():
        placed = HOST.arrays(arrays)
        on_host = functools.partial(cuda.load, runtime=HOST.runtime)
        results = row_blocks.load(on_host, plan, placed)(placed, [None] * len(plan.outputs))
        return [HOST.host(r) for r in results]


def torch_passes(
    function: Callable[..., Any], arrays: Sequence[Any], wanted: Sequence[int], rng: np.random.Generator
) -> tuple[Arrays, Arrays, list[Any]]:
    """PyTorch's results, cotangents drawn for them, and its gradients."""
    tensors = [torch.tensor(a) for a in arrays]
    for k in wanted:
        tensors[k].requires_grad_()
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    cotangents = [rng.standard_normal(tuple(r.shape)) for r in results]
    pairs = [(r, torch.tensor(c)) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad(
        [r for r, _ in pairs], [tensors[k] for k in wanted], [c for _, c in pairs], allow_unused=True
    )
    return [r.detach().numpy() for r in results], cotangents, [None if f is None else f.numpy() for f in found]


class Torch:
    """Functions of PyTorch under the names and with the arguments that chains call them with."""

    linear = staticmethod(torch.nn.functional.linear)
    broadcast_to = staticmethod(torch.broadcast_to)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.nn.functional, name, None)
        return found if callable(found) and name not in ("tanh", "sigmoid") else getattr(torch, name)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return torch.where(condition, torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64))

    @staticmethod
    def sum(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return torch.sum(x, tuple(range(x.dim())) if axis is None else axis, keepdim=keepdims)

    @staticmethod
    def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return torch.mean(x, tuple(range(x.dim())) if axis is None else axis, keepdim=keepdims)

    @staticmethod
    def max(x: Any, axis: Any, keepdims: bool = False) -> Any:
        return torch.amax(x, axis, keepdim=keepdims)

    @staticmethod
    def min(x: Any, axis: Any, keepdims: bool = False) -> Any:
        return torch.amin(x, axis, keepdim=keepdims)

    @staticmethod
    def prod(x: Any, axis: Any, keepdims: bool = False) -> Any:
        return torch.prod(x, axis, keepdim=keepdims)

    @staticmethod
    def var(x: Any, axis: Any, keepdims: bool = False) -> Any:
        return torch.var(x, axis, correction=0, keepdim=keepdims)

    @staticmethod
    def logsumexp(x: Any, axis: Any, keepdims: bool = False) -> Any:
        return torch.logsumexp(x, axis, keepdim=keepdims)

    @staticmethod
    def softmax(x: Any, axis: int) -> Any:
        return torch.softmax(x, axis)

    @staticmethod
    def log_softmax(x: Any, axis: int) -> Any:
        return torch.log_softmax(x, axis)

    @staticmethod
    def cast(x: Any, name: str) -> Any:
        return x.to(getattr(torch, name))


class Ours:
    """The same names as functions of cupyfuse, or else of NumPy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cf, name, None) or getattr(np, name)

    @staticmethod
    def cast(x: Any, name: str) -> Any:
        return x.astype(name)


SHAPES = {"x": (6, 5), "w": (7, 5), "b": (7,), "r": (6, 1), "c": (5,), "s": (), "y": (6, 7)}


def chain(text: str, namespace: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(f"lambda {', '.join(SHAPES)}: {text}", {"m": namespace})
    return function


def drawn(rng: np.random.Generator) -> Arrays:
    return [np.asarray(rng.standard_normal(shape)) for shape in SHAPES.values()]


def assert_gradients(found: Sequence[Any], expected: Sequence[Any], rtol: float, where: str) -> None:
    for name, ours, theirs in zip(SHAPES, found, expected, strict=False):
        if theirs is None or not np.any(theirs):  # what PyTorch makes zeros of, nothing may flow to
            assert ours is None or not np.any(ours) or np.allclose(ours, 0, atol=rtol), f"{where}: gradient of {name}"
            continue
        assert ours is not None, f"{where}: no gradient of {name}"
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        scale = 1 + np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * scale, err_msg=f"{where}: gradient of {name}")


def compare(text: str, rng: np.random.Generator, engine: str = "numpy", rtol: float = 1e-10, **options: Any) -> Passes:
    arrays, wanted = drawn(rng), list(range(len(SHAPES)))
    passes = Passes(chain(text, Ours()), arrays, **options)
    results, cotangents, expected = torch_passes(chain(text, Torch()), arrays, wanted, rng)
    cotangents = [c.astype(r.dtype) for c, r in zip(cotangents, results, strict=True)]
    outputs, found = passes(arrays, cotangents, engine)
    for ours, theirs in zip(outputs, results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)
    assert_gradients(found, expected, 1e-6 if "float32" in text else rtol, text)
    return passes
