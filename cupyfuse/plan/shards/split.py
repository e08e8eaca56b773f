"""Split a graph along one axis over shards.

A shard has some elements of the axis: columns of a product, and with them columns of its right operand. What lies
between two reductions along that axis runs on each shard by itself, a *round*. It ends with the states of reductions,
which merge over all shards; the next round starts from the merged values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...rewrite.order import merge_passes
from ..schedule.cut import COLUMNS, ROWS, WHOLE, Mode, Part, across_rows, operands_of_part
from .states import StateRule, rule_of


class SplitError(TypeError):
    """A graph cannot be split along an axis; the message says why, and the way out."""


@dataclass(frozen=True)
class Round:
    """What shards compute up to the next merge.

    Attributes
    ----------
    reductions : tuple of (Node, StateRule)
        The reductions along the split axis, and contractions of it, that end the round.
    covered : tuple of (Node, int)
        Further reductions, and the number of the part, counted over all states, that they are.
    names : tuple of str
        Of the parts of all states, in order.
    kept : tuple of Node
        Products that this round computes and later ones read again, and results if these are early; a shard keeps its
        part of them, rounded to their dtype, as operations one by one round them.
    """

    reductions: tuple[tuple[Node, StateRule], ...]
    covered: tuple[tuple[Node, int], ...]
    names: tuple[str, ...]
    kept: tuple[Node, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules by which the parts merge."""
        return tuple(rule.name for _, rule in self.reductions)


class Shards:
    """A graph split along one axis.

    Every graph that this class returns takes the arguments of the function, then the inputs in `inputs_after`.

    Parameters
    ----------
    graph : Graph
        As traced, with all elements of the axis.
    split : mapping of int to int
        The axis (0: rows, 1: columns) along which the nodes of arguments are split, by argument number.
    length : int
        Of the split axis.
    results : mapping of int to int, optional
        The axis along which results are split that shards could compute as a whole, by result.
    most_kept : int, optional
        Bytes of a product, of all shards together, up to which it is kept for later rounds. Larger ones are computed
        again.
    early : bool
        Whether results that are split and known in a round before the last are computed there, together with what
        that round reads, and kept. Otherwise all results are computed at the end.

    Attributes
    ----------
    rounds : tuple of Round
        That end with a merge; what follows the last one finishes the results.
    modes : dict
        Of the values that are split: the axis.
    result_modes : tuple of int
        Of each result: the axis along which it is split, or `WHOLE`.
    sliced : dict
        The axis along which shards take their elements of arguments that are given whole, by argument number.
    positions : bool
        Whether the position of a shard's first element is an input.

    Raises
    ------
    SplitError
        An operation needs all elements of the axis, and its results do not merge.
    """

    def __init__(
        self,
        graph: Graph,
        split: Mapping[int, int],
        length: int,
        *,
        results: Mapping[int, int] | None = None,
        most_kept: int | None = None,
        early: bool = False,
    ):
        if graph.effects:
            raise SplitError("an argument that is changed in place cannot be split: return the new value instead")
        self.graph = merge_passes(graph)
        self.length = length
        self.sliced: dict[int, Mode] = {}
        self._split = dict(split)
        self._results, self._most_kept, self._early_too = results or {}, most_kept, early
        self._analyse()
        while divided := self._divided_arguments():
            self._split.update(divided)
            self._analyse()
            self.sliced.update(divided)

    def _analyse(self) -> None:
        """Find which values are split, the rounds, and what shards read of arguments that are given whole."""
        self.modes: dict[Node, Mode] = {}
        self._depths: dict[Node, int] = {}  # the round in which a value is known
        self._crossing: dict[Node, StateRule] = {}  # reductions along the axis, by value
        for node in g.topological([*self.graph.inputs, *self.graph.outputs]):
            self._place(node)
        self.positions = any(rule.gives_position for rule in self._crossing.values())
        outputs, asked = self.graph.outputs, self._results
        self._depth = max((self._depths[n] for n in outputs), default=0)
        self.result_modes = tuple(self.modes.get(n, asked.get(k, WHOLE)) for k, n in enumerate(outputs))
        self._early = [self._early_too and n in self.modes and self._depths[n] < self._depth for n in outputs]
        self.rounds = tuple(map(self._round, range(self._depth)))

    # Which values are split, and when they are known
    def _place(self, node: Node) -> None:
        depth = max((self._depths[i] for i in node.inputs), default=0)
        if node.op == "input" and node.argument in self._split:
            self.modes[node] = self._split[node.argument]
        elif any(i in self.modes for i in node.inputs):
            mode = next((m for m in (ROWS, COLUMNS) if self._follows(node, m)), None)
            if mode is not None:
                self.modes[node] = mode
            else:
                self._crossing[node] = self._merging_rule(node)
                depth += 1
        self._depths[node] = depth

    def _follows(self, node: Node, mode: Mode) -> bool:
        """Whether a shard computes its elements of a value from its own elements of the operands."""
        parts = _operands(node, mode, self.length)
        return parts is not None and all(self.modes.get(i, needed) == needed for i, needed in parts)

    def _merging_rule(self, node: Node) -> StateRule:
        """Return the rule by which a value merges that needs all shards."""
        rule = rule_of(node)
        if rule is not None and node.reduction and self.modes.get(node.inputs[0]) == node.axis:
            return rule
        if rule is not None and node.op == "matmul":
            a, b = node.inputs
            if self.modes.get(a, COLUMNS) == COLUMNS and self.modes.get(b, ROWS) == ROWS:
                return rule
        what = f"{across_rows(node).removesuffix(' across rows')} of {node.shape[0]} x {node.shape[1]}"
        if node.op == "library":
            raise SplitError(
                f"{what} runs on whole arrays, as one call of the array library: it needs all elements of the split "
                "axis. Compute it outside; of integers and complex numbers, many operations are such, and convert to "
                "floats first"
            )
        raise SplitError(
            f"{what} needs all elements of the split axis, and results of shards do not merge; gather its operand "
            "first, and compute it outside"
        )

    def _round(self, number: int) -> Round:
        ends = [(n, rule) for n, rule in self._crossing.items() if self._depths[n] == number + 1]
        # The maximum of an expsum is one of its parts, and so on.
        parts = {(name, n.inputs[0], n.axis) for n, r in ends if n.op != "matmul" for name in r.names[:-1]}
        alone = [(n, r) for n, r in ends if n.op == "matmul" or (n.op, n.inputs[0], n.axis) not in parts]
        places = [(n, name) for n, r in alone for name in r.names]
        covered = []
        for n, _ in ends:
            if all(n is not other for other, _ in alone):
                of = [
                    name == n.op and other.op != "matmul" and other.inputs[0] is n.inputs[0] for other, name in places
                ]
                covered.append((n, of.index(True)))
        several = len({name for _, name in places}) < len(places)
        names = tuple(f"{name} {k}" if several else name for k, (_, r) in enumerate(alone) for name in r.names)
        first = {n for n in self._products(number) if not any(n in self._products(k) for k in range(number))}
        later = {n for k in range(number + 1, self._depth + 1) for n in self._products(k)}
        kept = {n for n in first & later if self._most_kept is None or n.nbytes <= self._most_kept}
        kept |= {
            n for n, early in zip(self.graph.outputs, self._early, strict=True) if early and self._depths[n] == number
        }
        return Round(tuple(alone), tuple(covered), names, tuple(n for n in self.modes if n in kept))

    def _products(self, number: int) -> set[Node]:
        """Return the split products that a round reads."""
        parts = g.topological(self._roots(number), self._parts_of)
        return {n for n, mode in parts if n.op == "matmul" and mode != WHOLE and n in self.modes}

    def _roots(self, number: int) -> list[Part]:
        """Return what a round computes: the operands of its reductions, or the results."""
        results = list(zip(self.graph.outputs, self.result_modes, self._early, strict=True))
        if number == self._depth:
            return [(n, mode) for n, mode, early in results if not early]
        ends = [n for n in self._crossing if self._depths[n] == number + 1]
        found = [part for n in ends for part in self._operands_of_reduction(n)]
        return [*found, *((n, mode) for n, mode, early in results if early and self._depths[n] == number)]

    def _operands_of_reduction(self, node: Node) -> list[Part]:
        if node.op == "matmul":
            return [(node.inputs[0], COLUMNS), (node.inputs[1], ROWS)]
        return [(node.inputs[0], node.axis)]

    def _parts_of(self, part: Part) -> list[Part]:
        """Return the operands that a shard computes a part from."""
        node, mode = part
        if node in self._crossing or node.op in ("input", "const", "positions"):
            return []
        found = _operands(node, mode, self.length)
        if found is None:
            raise SplitError(f"{across_rows(node)} cannot be computed for some elements of the split axis alone")
        return found

    def _divided_arguments(self) -> dict[int, Mode]:
        """Find what shards slice of arguments that are given whole, and whether they need positions.

        Returns
        -------
        dict
            The arguments that are also read as a whole, with the axis along which they are sliced. They are to be
            split, and what needs all of them merges.
        """
        taken: dict[int, set[Mode]] = {}
        for number in range(len(self.rounds) + 1):
            for node, mode in g.topological(self._roots(number), self._parts_of):
                if node.op == "positions" and mode == node.axis:
                    self.positions = True
                if node.op == "input" and node not in self.modes:
                    taken.setdefault(node.argument, set()).add(mode)
        self.sliced.update({k: mode for k, modes in taken.items() for mode in modes if mode != WHOLE})
        found = {k: modes - {WHOLE} for k, modes in taken.items() if len(modes) > 1}
        for number, modes in found.items():
            if len(modes) > 1:
                name = self.graph.inputs[number].name
                raise SplitError(
                    f"argument {name!r} is read along the split axis by rows and by columns; pass it twice"
                )
        return {k: mode for k, modes in found.items() for mode in modes}

    # The graphs
    @property
    def inputs_after(self) -> list[Node]:
        """The inputs behind the arguments: kept products, merged states, and the position of the first element."""
        kept = [n for r in self.rounds for n in r.kept]
        found = [(f"kept{k}", n.shape, n.dtype) for k, n in enumerate(kept)]
        for r in self.rounds:
            found += [(name, p.shape, p.dtype) for name, p in zip(r.names, self._state_parts(r), strict=True)]
        if self.positions:
            found.append(("first", (1, 1), "int64"))
        first = len(self.graph.inputs)
        return [g.argument(first + k, *fields) for k, fields in enumerate(found)]

    def _state_parts(self, r: Round) -> list[Node]:
        """Return nodes with the shapes and dtypes of a round's merged states."""
        found: list[Node] = []
        for node, rule in r.reductions:
            found += _stored(rule.local(node if node.op == "matmul" else node.inputs[0], node.axis))
        return found

    def local(self, number: int, width: int) -> Graph:
        """Return what a shard of `width` elements computes in a round: its states, then the products it keeps."""
        r = self.rounds[number]
        shard = _Shard(self, width, number)
        outputs: list[Node] = []
        for node, rule in r.reductions:
            outputs += shard.state(node, rule)
        for node in r.kept:
            outputs.append(g.cast(shard.part((node, self.modes[node])), node.dtype))
        return Graph(shard.inputs, outputs)

    def finish(self, width: int) -> Graph:
        """Return what a shard computes behind the last merge: the results, or its elements of those that are split."""
        shard = _Shard(self, width, len(self.rounds))
        # Merged states are wider than 16-bit reductions, and so may be what is computed from them.
        parts = zip(self.graph.outputs, self.result_modes, strict=True)
        return Graph(shard.inputs, [g.cast(shard.part((n, mode)), n.dtype) for n, mode in parts])


class _Shard:
    """Builds the graph of one round for a shard of some width."""

    def __init__(self, shards: Shards, width: int, number: int):
        self._shards, self._width, self._number = shards, width, number
        self._done: dict[Part, Node] = {}
        self.inputs: list[Node] = []
        for node in shards.graph.inputs:
            mode = shards.modes.get(node, shards.sliced.get(node.argument, WHOLE))
            own = replace(node, shape=self._shape(node, mode))
            self.inputs.append(own)
            self._done[node, mode] = own
        more = shards.inputs_after
        self._first = more[-1] if shards.positions else None
        kept = [(k, n) for k, r in enumerate(shards.rounds) for n in r.kept]
        for (k, node), given in zip(kept, more, strict=False):
            mode = shards.modes[node]
            own = replace(given, shape=self._shape(node, mode))
            self.inputs.append(own)
            if k < number:
                self._done[node, mode] = own
        self.inputs += more[len(kept) :]
        position = len(kept)
        for k, r in enumerate(shards.rounds):
            known = more[position : position + len(r.names)]
            position += len(known)
            if k < number:
                self._done.update(((node, WHOLE), known[place]) for node, place in r.covered)
                place = 0
                for node, rule in r.reductions:
                    self._done[node, WHOLE] = rule.value(tuple(known[place : place + len(rule.names)]))
                    place += len(rule.names)

    def _shape(self, node: Node, mode: Mode) -> g.Shape:
        if mode == WHOLE:
            return node.shape
        return (self._width, node.shape[1]) if mode == ROWS else (node.shape[0], self._width)

    def part(self, root: Part) -> Node:
        """Build a shard's elements of a value, or the whole value."""

        def operands(part: Part) -> Sequence[Part]:
            return () if part in self._done else self._shards._parts_of(part)

        for part in g.topological([root], operands):
            if part not in self._done:
                self._done[part] = self._build(part, [self._done[p] for p in operands(part)])
        return self._done[root]

    def _build(self, part: Part, inputs: list[Node]) -> Node:
        node, mode = part
        if node.op == "const":
            return node
        if node.op == "positions" and mode == node.axis:
            assert self._first is not None
            here = g.positions(self._width, node.axis, node.dtype)
            return g.pointwise("add", here, g.cast(self._first, node.dtype))
        if not node.inputs:
            return node
        return g.with_inputs(node, inputs, self._shape(node, mode))

    def state(self, node: Node, rule: StateRule) -> list[Node]:
        """Build the parts of a reduction's state."""
        if self._width == 0:
            x = node if node.op == "matmul" else node.inputs[0]
            numbers = zip(_stored(rule.local(x, node.axis)), rule.identity(x.dtype), strict=True)
            return [g.broadcast(g.cast(g.const(number), part.dtype), part.shape) for part, number in numbers]
        operands = [self.part(p) for p in self._shards._operands_of_reduction(node)]
        parts = rule.local(g.with_inputs(node, operands) if node.op == "matmul" else operands[0], node.axis)
        if rule.gives_position:
            assert self._first is not None
            parts = (*parts[:-1], g.pointwise("add", parts[-1], self._first))
        return _stored(parts)


def _stored(parts: Sequence[Node]) -> list[Node]:
    """Return parts of a state in the dtypes in which they are stored and merged: those that they are computed in."""
    return [g.cast(p, dtypes.compute_dtype(p.dtype)) for p in parts]


def _operands(node: Node, mode: Mode, length: int) -> list[Part] | None:
    """Return what a shard needs of a node's operands, as `operands_of_part`; also of vectors that are reshaped."""
    if mode != WHOLE and node.op == "reshape" and node.shape[mode] == length:
        (x,) = node.inputs
        is_vector = 1 in node.shape and 1 in x.shape
        return [(x, 0 if x.shape[0] == length else 1)] if is_vector and length > 1 else None
    if mode != WHOLE and node.op == "slice":
        keeps_axis = node.shape[mode] == length == node.inputs[0].shape[mode] and node.dims[mode] == (0, 1)
        return [(node.inputs[0], mode)] if keeps_axis else None
    return operands_of_part(node, mode, length)
