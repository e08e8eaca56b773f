"""A call of a fused function on Dask arrays: it adds to their graph, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask.array import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .. import dtypes
from ..api import arrays
from ..api.lazy import check_lengths, contains_lazy, is_lazy
from ..api.planned_function import PlannedFunction
from ..api.structures import structure_of
from ..api.tracing import graph_key
from ..plan.shards import SplitError
from ..trace import Axes
from .chunks import align, axes_in, pieces_of
from .layers import layers_of
from .lower import Lowering
from .tasks import Options


def call(function: PlannedFunction, values: Sequence[Any]) -> Any:
    """Return the results of a function as Dask arrays, in its own structure.

    Parameters
    ----------
    function : PlannedFunction
    values : sequence
        The value of each parameter.

    Raises
    ------
    TypeError
        Chunks and other arguments are on different devices, the function changes an argument, or an
        operation needs all elements of a chunked axis.
    ValueError
        The lengths of chunks are unknown.
    """
    described = _Described(function.names, values)
    name = getattr(function.__wrapped__, "__name__", "fused")
    # Floats are constants: a graph in Dask is of one call.
    signature = function.signature_of(described.values, specs=True, by_value=function.names)
    tracing = function._trace(described.values, signature, for_shards=True)
    graph = tracing.traced.graph
    if graph.effects:
        changed = graph.inputs[graph.effects[0][0]].name
        raise TypeError(
            f"argument {changed!r}: the function changes it in place, and chunks of Dask arrays cannot be changed; "
            "return the new value, and change the argument outside"
        )
    leaves = list(signature.leaves)
    chunked = {k: described.arrays[id(leaf)] for k, leaf in enumerate(leaves) if id(leaf) in described.arrays}
    _check_places(chunked, leaves, signature.names)
    chunked, dimensions, split = align(graph, chunked, name)

    precision, epilogues = function.product_settings
    settings = function.settings(None)
    options = Options(precision, epilogues, settings.max_workspace, settings.keep_halves)
    whole = {k: leaf for k, leaf in enumerate([*leaves, *tracing.constants]) if k not in chunked}
    token = tokenize(
        name,
        options,
        [a.name for a in chunked.values()],
        list(whole.values()),
        repr(graph_key(graph)),
        repr(tracing.traced.axes),
    )
    lowering = Lowering(name, token, options, dimensions)
    origin = (0,) * len(dimensions)
    given: list[Any] = []
    for k in range(len(graph.inputs)):
        if k in chunked:
            given.append(pieces_of(chunked[k], axes_in(k, split), origin))
        else:
            given.append(lowering.given_whole(graph.inputs[k].name, whole[k], axes_in(k, split)))
    # As labels, axes are those of the whole results.
    axes = [Axes.of(a, n.shape) for a, n in zip(tracing.traced.axes, graph.outputs, strict=True)]
    try:
        made = layers_of(lowering, graph, axes, given, name, token) if axes else []
    except SplitError as error:
        which = " and ".join(f"{graph.inputs[k].name!r} (chunks {a.numblocks})" for k, a in chunked.items())
        raise TypeError(
            f"{name}: cannot compute it where {which} are chunked along several axes: {error}; or rechunk them to "
            "one chunk along all axes but one"
        ) from error
    before = HighLevelGraph.merge(*(a.dask for a in chunked.values()))
    lead = next(iter(chunked.values()))
    results = []
    for one, node in zip(made, graph.outputs, strict=True):
        after = HighLevelGraph({**before.layers, **one.layers}, {**before.dependencies, **one.dependencies})
        meta = meta_from_array(lead._meta, ndim=len(one.chunks), dtype=dtypes.to_numpy(node.dtype))
        results.append(Array(after, one.name, one.chunks, meta=meta))
    return tracing.results.rebuild(results)


def _check_places(chunked: dict[int, Any], leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Check that chunks are NumPy or CuPy arrays, and that all arguments are of the same of the two."""
    on_gpu: dict[str, bool] = {}
    for k, leaf in enumerate(leaves):
        value = chunked[k]._meta if k in chunked else leaf
        imported = arrays.import_array(value, names[k])
        if imported.export is not None:
            raise TypeError(
                f"argument {names[k]!r}: expected a Dask array of NumPy or CuPy arrays, got {type(value).__name__}; "
                "convert its chunks by map_blocks"
            )
        on_gpu[names[k]] = arrays.is_cupy(imported.array)
    if len(set(on_gpu.values())) > 1:
        where = ", ".join(f"{name} is {'CuPy' if gpu else 'NumPy'}" for name, gpu in on_gpu.items())
        raise TypeError(
            f"arguments are on different devices: {where}; convert them, Dask arrays by .map_blocks(cupy.asarray)"
        )


class _Described:
    """Arguments with a spec in the place of each Dask array.

    Attributes
    ----------
    values : list
    arrays : dict
        The Dask arrays, by the id of their specs.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any]):
        self.arrays: dict[int, Array] = {}
        self.values = [self._describe(value, name) for name, value in zip(names, values, strict=True)]

    def _describe(self, value: Any, name: str) -> Any:
        if is_lazy(value):
            check_lengths(value, name)
            spec = arrays.Spec(tuple(map(int, value.shape)), dtypes.name_of(value.dtype))
            self.arrays[id(spec)] = value
            return spec
        if isinstance(value, arrays.Spec):
            raise TypeError(f"argument {name!r}: a spec has no values; pass an array")
        if not contains_lazy(value):
            return value
        structure = structure_of(value)
        assert structure is not None
        pairs = zip(structure.children, structure.labels, strict=True)
        return structure.rebuild([self._describe(child, name + label) for child, label in pairs])
