"""Checkpointed regions of captured graphs: higher-order operators that call a graph of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from .importer import is_state
from .modes import leaving_modes

_CONTEXT = "_checkpoint_context_fn"
_FORWARD = "cupyfuse_forward"


def regions(module: GraphModule) -> list[GraphModule]:
    """List the checkpointed regions of a captured graph, inner ones first.

    Those with a context function of the user's are left out: it has to see every operation.
    """
    found: dict[GraphModule, None] = {}
    for node in _checkpoint_calls(module.graph):
        body = _region_called_by(module, node)
        if body is not None:
            found.update(dict.fromkeys(regions(body)))
            if _CONTEXT not in body.meta:
                found[body] = None
    return list(found)


def checkpoint_eagerly(module: GraphModule, state: Collection[Node] | None = None) -> None:
    """Make the regions of a graph that runs without a compiler recompute in the backward pass.

    Dynamo's operator leaves recomputation to AOTAutograd and random states to Inductor; called eagerly, it saves
    everything or recomputes with other random numbers.

    Parameters
    ----------
    module : GraphModule
    state : the graph's inputs that are parameters and buffers; found by their sources unless given
    """
    if state is None:
        state = {n for n in module.graph.nodes if n.op == "get_attr" or (n.op == "placeholder" and is_state(n))}
    for node in _checkpoint_calls(module.graph):
        body = _region_called_by(module, node)
        if body is not None:
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            checkpoint_eagerly(body, {i for i, n in zip(inner, node.args[1:], strict=True) if n in state})
            body.recompile()
            body.meta[_FORWARD] = leaving_modes(body)
            node.target = _checkpointed
            own = tuple(isinstance(n, Node) and n in state for n in node.args[1:])
            node.args = (node.args[0], own, *node.args[1:])


def _checkpoint_calls(graph: Graph) -> Iterator[Node]:
    """Yield the calls of checkpointed regions."""
    return (n for n in graph.nodes if n.target is tag_activation_checkpoint)


def _region_called_by(module: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph of the checkpointed region that a call runs; None if it runs no captured graph."""
    first = node.args[0]
    assert isinstance(first, Node)
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _checkpointed(body: GraphModule, state: Sequence[bool], *args: Any, **options: Any) -> Any:
    """Run a region under `torch.utils.checkpoint`.

    Parameters and buffers are captured by closure, since the region may change them, as `batch_norm` does. Results
    depend on them too, which rules out the reentrant variant, whatever was asked for.
    """
    own = [a for a, kept in zip(args, state, strict=True) if kept]

    def region(*given: Any) -> Any:
        held, passed = iter(own), iter(given)
        return body.meta[_FORWARD](*(next(held) if kept else next(passed) for kept in state))

    options["use_reentrant"] = False
    if _CONTEXT in body.meta:
        options["context_fn"] = body.meta[_CONTEXT]
    if any("_increment_nesting" in str(n.target) for n in body.graph.nodes):
        options["early_stop"] = False  # stopping within a transform would leave it on PyTorch's stack
    return checkpoint(region, *(a for a, kept in zip(args, state, strict=True) if not kept), **options)
