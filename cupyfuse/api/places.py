"""Where a signature has the arrays and numbers that another walk over the same values meets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .objects import Span
from .signature import Signature


class MixedUp(RuntimeError):
    """A walk meets other arrays or numbers than the signature did."""

    def __init__(self) -> None:
        super().__init__(
            "the arrays or numbers around a fused function were found in one order when its arguments were read and in "
            "another when it was traced; this is an error of cupyfuse, or a container changed in between; pass the "
            "arrays as arguments"
        )


_NOWHERE = Span(0, 0, 0, 0)  # of a variable with neither


class Places:
    """The positions of arrays and numbers in the order in which a walk meets them.

    Each belongs to the innermost attribute of an object, or variable around a function, that holds it, or to none. A
    walk may come to attributes and variables in another order than the signature did, and says which it is in; what
    belongs to each is met in the order of the signature.
    """

    def __init__(self, signature: Signature):
        self._signature = signature
        self._around = {found: variable.span for found, variable in signature.around.items()}
        if signature.taken is not None:
            leaf, number = signature.first_taken
            for found, (_, _, _, span) in signature.taken.own.around.items():
                self._around[found] = Span(span[0] + leaf, span[1] + leaf, span[2] + number, span[3] + number)
        # The owner of each position. A variable that a function reads takes its own from the attribute or variable that
        # holds the function, which the signature has behind it.
        spans = [s for held in signature.objects for s in held.spans.values()] + [*self._around.values()][::-1]
        of_leaves: list[Span | None] = [None] * len(signature.leaves)
        of_numbers: list[Span | None] = [None] * len(signature.places)
        for span in spans:
            of_leaves[span.first_leaf : span.last_leaf] = [span] * (span.last_leaf - span.first_leaf)
            of_numbers[span.first_number : span.last_number] = [span] * (span.last_number - span.first_number)
        self._spans = spans  # so that their ids stay theirs
        self._by_owner: dict[int, tuple[list[int], list[int | None]]] = {}
        for position, owner in enumerate(of_leaves):
            self._owned_by(owner)[0].append(position)
        for place, owner in zip(signature.places, of_numbers, strict=True):
            self._owned_by(owner)[1].append(place)
        leaves, numbers = self._owned_by(None)
        self._leaves: Iterator[int] = iter(leaves)
        self._numbers: Iterator[int | None] = iter(numbers)

    def _owned_by(self, span: Span | None) -> tuple[list[int], list[int | None]]:
        """Return the positions of arrays and of numbers that belong to an attribute or a variable, or to none."""
        return self._by_owner.setdefault(id(span), ([], []))

    def next_leaf(self) -> int:
        """Return the position of the next array."""
        for position in self._leaves:
            return position
        raise MixedUp

    def next_number(self) -> int | None:
        """Return the position of the next number, None for a constant."""
        for place in self._numbers:
            return place
        raise MixedUp

    @contextlib.contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Walk an attribute of an object."""
        around = self._leaves, self._numbers
        leaves, numbers = self._owned_by(span)
        self._leaves, self._numbers = iter(leaves), iter(numbers)
        yield
        self.check_complete()
        self._leaves, self._numbers = around

    def within_variable(self, holder: Any, label: str) -> contextlib.AbstractContextManager[None]:
        """Walk a variable or a default value."""
        return self.within(self._around.get((id(holder), label), _NOWHERE))

    @contextlib.contextmanager
    def within_taken(self) -> Iterator[None]:
        """Walk the arrays and numbers in a signature of the variables that was taken before, without constants."""
        assert self._signature.taken is not None
        own, (leaf, number) = self._signature.taken.own, self._signature.first_taken
        around = self._leaves, self._numbers
        places = self._signature.places[number : number + len(own.places)]
        self._leaves = iter(range(leaf, leaf + len(own.leaves)))
        self._numbers = iter([place for place in places if place is not None])
        yield
        self.check_complete()
        self._leaves, self._numbers = around

    def check_complete(self) -> None:
        """Raise an error if the walk has not met all arrays and numbers."""
        if any(True for _ in self._leaves) or any(True for _ in self._numbers):
            raise MixedUp
