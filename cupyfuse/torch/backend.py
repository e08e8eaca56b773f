"""The backend of `torch.compile`: chains run through cupyfuse, Inductor compiles the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch.fx import Graph, GraphModule

from ..errors import first_line
from .chains.options import Options
from .cost import decision
from .graphs.attention import prepare_attention
from .graphs.captured import CapturedGraph
from .graphs.importer import ImportedGraph
from .graphs.inplace import functionalise, remove_conversions_to_the_same, remove_inactive_dropouts
from .graphs.lowering import AsOperator, CallMaker, lower
from .graphs.partition import Judge, Partition, partition
from .graphs.powers import call_powers_of_numbers
from .graphs.regions import checkpoint_eagerly, regions
from .graphs.views import rewrite_views

_PREFIX = "cupyfuse."  # of the options that are parameters of `fuse`
_MOST_IMPORTS = 4  # of a graph: each takes back what was reordered for no chain in the one before


def backend(module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Fuse a graph's chains and compile it with Inductor: the backend "cupyfuse" of `torch.compile`.

    Parameters
    ----------
    module, example_inputs
        As `torch.compile` gives them.
    **options
        `mode` and `options` of `torch.compile`. Options whose names begin with "cupyfuse." are parameters of `fuse`
        (`{"cupyfuse.precision": "high"}`); the others are Inductor's.
    """
    from torch._inductor import compile_fx, list_mode_options

    patches = dict(options.get("options") or {})
    if options.get("mode"):
        patches = {**list_mode_options(options["mode"]), **patches}
    own = {name.removeprefix(_PREFIX): patches.pop(name) for name in list(patches) if name.startswith(_PREFIX)}
    known = [field.name for field in fields(Options)]
    for name in own:
        if name not in known:
            expected = ", ".join(_PREFIX + n for n in known)
            raise ValueError(f"options: there is no {_PREFIX + name!r}; expected one of {expected}")
    chosen = Options(**own)
    if not _is_wrapped_in_cpp(patches):
        cudagraph = bool(patches.get("triton.cudagraphs"))
        beside_gpu = decision.on_gpu((*example_inputs, *module.parameters(), *module.buffers()))
        judge = decision.judge_for(chosen, compiled=True, cudagraph=cudagraph, beside_gpu=beside_gpu)
        fuse_module(module, AsOperator(chosen), judge)
    compiled: Callable[..., Any] = compile_fx.compile_fx(module, list(example_inputs), config_patches=patches or None)
    return compiled


def fuse_module(module: GraphModule, call_maker: CallMaker, judge: Judge) -> list[Partition]:
    """Replace the chains of a captured graph and of its checkpointed regions by calls, in place.

    A graph for which this fails keeps its operations, with a warning; its `Partition` says why.
    """
    partitions: list[Partition] = []
    graphs: list[Graph] = []
    for body in (*regions(module), module):
        try:
            if prepare_attention(body.graph, compiled=not call_maker.differentiates):
                body.recompile()
            imported, parts = _partition(body, judge, graphs)
            graph = imported.graph
            if parts.chains:
                lower(imported, parts, call_maker)
                graph.lint()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            warnings.warn(f"cupyfuse left a captured graph to PyTorch: {reason}", RuntimeWarning, stacklevel=2)
            partitions.append(Partition(CapturedGraph(), [], {}, reason))
            continue
        partitions.append(parts)
        if parts.chains:
            body.graph = graph
            body.recompile()
    if call_maker.differentiates:
        call_powers_of_numbers(module)
        checkpoint_eagerly(module)
        module.recompile()
        for node in (node for graph in graphs for node in graph.nodes):
            node.meta.pop("grapharg", None)  # a weak reference to a parameter: `torch.utils.swap_tensors` refuses those
    return partitions


def fuse_graph(graph: Graph, only_gains: bool = True) -> None:
    """Replace the chains of a graph by calls, in place; serves as `torch._inductor.config.pre_grad_custom_pass`.

    What was reordered for chains that do not gain stays so, which costs Inductor's kernels nothing.
    """
    if _is_wrapped_in_cpp({}):
        return
    chosen = Options(only_gains=only_gains)
    prepare_attention(graph, compiled=True)
    imported = _import(graph)
    judge = decision.judge_for(chosen, compiled=True, beside_gpu=decision.on_gpu(imported.captured.tensors))
    lower(imported, partition(imported.captured, judge), AsOperator(chosen))
    graph.lint()


def _is_wrapped_in_cpp(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor calls operators from C++, with a warning: it crashes where one returns a list of one tensor.

    Nor does it escape quotes in their arguments. `patches` are changes of Inductor's configuration.
    """
    from torch._inductor import config

    wrapped = bool(patches.get("cpp_wrapper", config.cpp_wrapper))
    if wrapped:
        message = "cupyfuse left a captured graph to PyTorch: Inductor's cpp_wrapper cannot call operators such as ours"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return wrapped


def _partition(body: GraphModule, judge: Judge, copies: list[Graph]) -> tuple[ImportedGraph, Partition]:
    """Import a copy of a graph and partition it; what was reordered for chains that do not gain keeps its order.

    Names of nodes are the same in all copies, which are appended to `copies`: their metadata is cleared later.
    """
    kept: set[str] = set()
    for _ in range(_MOST_IMPORTS):
        copies.append(_copy(body))
        imported = _import(copies[-1], kept)
        parts = partition(imported.captured, judge)
        in_vain = parts.reordered_in_vain
        if not parts.chains or not in_vain:
            break
        kept |= in_vain
    return imported, parts


def _import(graph: Graph, kept: Collection[str] = ()) -> ImportedGraph:
    """Import a graph, rewritten: without what returns its argument, in-place operations and views that end chains.

    The results of the nodes whose names are in `kept` are not reordered.
    """
    remove_inactive_dropouts(graph)
    remove_conversions_to_the_same(graph)
    functionalise(graph)
    rewrite_views(graph, kept)
    return ImportedGraph(graph)


def _copy(module: GraphModule) -> Graph:
    """Copy a module's graph, with what `graph_copy` leaves out: Dynamo's sources of inputs, and the code generator."""
    graph = Graph(module)
    mapping: dict[Any, Any] = {}
    result = graph.graph_copy(module.graph, mapping)
    for old, new in mapping.items():
        source = getattr(old, "_dynamo_source", None)
        if source is not None:
            new._dynamo_source = source
    graph.output(result)
    graph._codegen = module.graph._codegen
    return graph
