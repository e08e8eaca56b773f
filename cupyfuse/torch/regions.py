"""Checkpointed regions of captured graphs: higher-order operators that call a graph of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

_EARLY_STOP = "early_stop" in inspect.signature(checkpoint).parameters
_CONTEXT = "_checkpoint_context_fn"


def regions(module: GraphModule) -> list[GraphModule]:
    """The checkpointed regions of a captured graph, inner ones first.

    Not those with a context of the user's, which is to see every operation of the region.
    """
    found: dict[GraphModule, None] = {}
    for node in _nodes(module.graph):
        body = _body(module, node)
        if body is not None:
            found.update(dict.fromkeys(regions(body)))
            if _CONTEXT not in body.meta:
                found[body] = None
    return list(found)


def checkpoint_eagerly(module: GraphModule) -> None:
    """Let the regions of a graph that runs as it is be checkpointed.

    The operator that Dynamo puts there leaves it to AOTAutograd to recompute a region, and the state of random
    generators to Inductor; called eagerly it either keeps everything or recomputes with other random numbers.
    """
    for node in _nodes(module.graph):
        body = _body(module, node)
        if body is not None:
            checkpoint_eagerly(body)
            body.recompile()
            node.target = _checkpointed


def _nodes(graph: Graph) -> Iterator[Node]:
    return (n for n in graph.nodes if n.target in (tag_activation_checkpoint, _checkpointed))


def _body(module: GraphModule, node: Node) -> GraphModule | None:
    first = node.args[0]
    assert isinstance(first, Node)
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _checkpointed(body: GraphModule, *args: Any, **options: Any) -> Any:
    """Run a region so that its backward pass computes it once more.

    Not the reentrant way, whatever was asked for: parameters that the region reads are arguments here.
    """
    options["use_reentrant"] = False
    if _CONTEXT in body.meta:
        options["context_fn"] = body.meta[_CONTEXT]
    if _EARLY_STOP and any("_increment_nesting" in str(n.target) for n in body.graph.nodes):
        options["early_stop"] = False  # stopping within a transform would leave it on PyTorch's stack
    return checkpoint(body.forward, *args, **options)


