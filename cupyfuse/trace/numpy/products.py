"""Native forms of NumPy's products and einsum: matrix products and weighted sums; what is neither is a library step."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import dtypes
from ...ir import graph as g
from ..broadcasting import expand
from ..library import call_library
from ..operations import apply, as_tracer, reduce, trace_of
from ..products import dot, matmul
from ..shape_functions import writable_diagonal
from ..tracer import Tracer
from ..user_code import refuse_options, user_line


def _operands(*values: Any) -> list[Tracer]:
    """Return operands as traced arrays; numbers are arrays in promotion."""
    trace = trace_of(values)
    return [v if isinstance(v, Tracer) else as_tracer(np.asarray(v), trace) for v in values]


def _dot(a: Any, b: Any, out: Any = None) -> Any:
    refuse_options("np.dot", out=out)
    return dot(*_operands(a, b))


def _inner(a: Any, b: Any, /) -> Any:
    a, b = _operands(a, b)
    if not a.ndim or not b.ndim:
        return apply("multiply", a, b)
    if b.ndim > 2:
        return call_library("inner", [a, b])
    return matmul(a, b.T if b.ndim == 2 else b)


def _outer(a: Any, b: Any, out: Any = None) -> Any:
    refuse_options("np.outer", out=out)
    a, b = _operands(a, b)
    return apply("multiply", a.flatten()[:, None], b.flatten()[None, :])


def _outer_of_vectors(a: Any, b: Any, /) -> Any:
    if np.ndim(a) != 1 or np.ndim(b) != 1:
        raise ValueError(
            f"linalg.outer: vectors are expected, got {np.ndim(a)} and {np.ndim(b)} dimensions\n  at {user_line()}"
        )
    return _outer(a, b)


def _vdot(a: Any, b: Any, /) -> Any:
    a, b = _operands(a, b)
    if any(dtypes.is_opaque(x._node.dtype) for x in (a, b)):
        return call_library("vdot", [a, b])
    return matmul(a.flatten(), b.flatten())


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Sum products over pairs of axes: of floats as an einsum, else by a library step."""
    a, b = _operands(a, b)
    if isinstance(axes, (int, np.integer)):
        left, right = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    else:
        left, right = ([int(n)] if isinstance(n, (int, np.integer)) else list(n) for n in axes)
    einsum = _as_einsum(a, b, left, right)
    result = call_library("tensordot", [a, b], {"axes": axes}) if einsum is None else _contract_all(*einsum)
    result._is_array = True
    return result


def _as_einsum(a: Tracer, b: Tracer, left: list[int], right: list[int]) -> tuple[list[_Term], str] | None:
    """Return the sum of products over pairs of axes of a and b as the operands and the result's letters of an einsum.

    Returns None for what has no native form, as `_parse` does.
    """
    letters = string.ascii_letters
    is_native = all(dtypes.is_float(x._node.dtype) for x in (a, b)) and a.ndim + b.ndim <= len(letters)
    if not is_native or len(left) != len(right):
        return None
    first, second = list(letters[: a.ndim]), list(letters[a.ndim : a.ndim + b.ndim])
    for p, q in zip(left, right, strict=True):
        second[q] = first[p]
    if len(set(left)) != len(left) or any(a.shape[p] != b.shape[q] for p, q in zip(left, right, strict=True)):
        return None
    free = [c for c in first if c not in second] + [c for c in second if c not in first]
    return [("".join(first), a), ("".join(second), b)], "".join(free)


def _multi_dot(arrays: Sequence[Any], *, out: Any = None) -> Any:
    """Multiply a chain of matrices in the order with the fewest multiplications."""
    refuse_options("np.linalg.multi_dot", out=out)
    given = _operands(*arrays)
    shapes = [t.shape for t in given]
    ranks = [len(s) for s in shapes]
    if len(given) < 2 or any(r != 2 for r in ranks[1:-1]) or {ranks[0], ranks[-1]} - {1, 2}:
        return call_library("linalg.multi_dot", [list(given)])
    sizes = [shapes[0][0] if ranks[0] == 2 else 1, *(s[0] for s in shapes[1:]), shapes[-1][-1] if ranks[-1] == 2 else 1]
    return _multiply_range(given, _best_splits(sizes), 0, len(given) - 1)


def _best_splits(sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return the last matrix of the left factor for each range (first, last) of matrices, by dynamic programming.

    Matrix i has the shape (sizes[i], sizes[i + 1]).
    """
    count = len(sizes) - 1
    cost = {(i, i): 0 for i in range(count)}
    split: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            work = {k: cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)}
            split[i, j] = min(work, key=work.__getitem__)
            cost[i, j] = work[split[i, j]]
    return split


def _multiply_range(matrices: list[Tracer], splits: dict[tuple[int, int], int], i: int, j: int) -> Tracer:
    """Multiply the matrices i to j."""
    if i == j:
        return matrices[i]
    k = splits[i, j]
    return matmul(_multiply_range(matrices, splits, i, k), _multiply_range(matrices, splits, k + 1, j))


# einsum -------------------------------------------------------------------------------------------------------------

_Term = tuple[str, Tracer]  # an operand, with a letter for each axis


def _einsum(*operands: Any, out: Any = None, optimize: Any = False, **options: Any) -> Any:
    """Contract as `numpy.einsum`: natively where `_parse` can, else by a library step."""
    refuse_options("np.einsum", out=out)
    if options:
        return call_library("einsum", operands, options)
    given = operands
    if isinstance(operands[0], str):
        given = (operands[0], *_operands(*operands[1:]))
        found = _parse(operands[0], list(given[1:]))
        if found is not None:
            return _contract_all(*found)
    return call_library("einsum", given, {"optimize": bool(optimize)})


def _parse(subscripts: str, operands: list[Tracer]) -> tuple[list[_Term], str] | None:
    """Parse subscripts, with letters for the axes of ellipses.

    An operand that has a letter twice becomes its diagonal. Returns None for what has no native form: dtypes other than
    floats, but for views of one operand, and shapes that do not fit.
    """
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    # The axes of each operand that its letters do not name: those of its ellipsis.
    unnamed = [x.ndim - len(term.replace("...", "")) for term, x in zip(terms, operands, strict=True)]
    if min(unnamed) < 0:
        return None
    unused = [c for c in string.ascii_letters if c not in subscripts]
    ellipsis = "".join(unused[: max(unnamed)])
    # Ellipses broadcast: that of fewer axes has the last letters.
    terms = [t.replace("...", ellipsis[len(ellipsis) - n :]) for t, n in zip(terms, unnamed, strict=True)]
    letters = "".join(terms)
    if arrow:
        result = result.replace("...", ellipsis)
    else:
        result = ellipsis + "".join(sorted(c for c in set(letters) - set(ellipsis) if letters.count(c) == 1))
    result_fits = len(set(result)) == len(result) and set(ellipsis) <= set(result) <= set(letters)
    is_view = len(terms) == 1 and set(letters) == set(result)
    if not result_fits or not (is_view or all(dtypes.is_float(x._node.dtype) for x in operands)):
        return None
    pairs = list(zip(terms, operands, strict=True))
    return ([_diagonals(term, x) for term, x in pairs], result) if _shapes_fit(pairs) else None


def _shapes_fit(terms: list[_Term]) -> bool:
    """Whether each operand has one letter for each axis, and each letter one size."""
    sizes: dict[str, int] = {}
    for term, x in terms:
        if len(term) != x.ndim or not (term.isalpha() or not term):
            return False
        if any(sizes.setdefault(c, n) != n for c, n in zip(term, x.shape, strict=True)):
            return False
    return True


def _diagonals(term: str, x: Tracer) -> _Term:
    """Return an operand with each letter once: where a letter has several axes, a view of their diagonal."""
    for c in sorted(set(term)):
        while term.count(c) > 1:
            a, b = term.index(c), term.rindex(c)
            term, x = "".join(d for p, d in enumerate(term) if p not in (a, b)) + c, writable_diagonal(x, a, b)
    return term, x


def _contract_all(operands: list[_Term], result: str) -> Tracer:
    """Compute an einsum of floats: multiply two operands at a time, and sum over the letters that the result lacks."""
    dtype = g.promoted_dtype(x._node for _, x in operands)  # in which NumPy also sums each operand
    sizes = {c: n for term, x in operands for c, n in zip(term, x.shape, strict=True)}
    if any(n == 0 and c not in result for c, n in sizes.items()):
        # A sum of no terms is 0, even times infinity, where NumPy's einsum gives NaN.
        zero = g.cast(g.const(0.0), dtype)
        return expand(operands[0][1]._trace.array(zero, ()), tuple(sizes[c] for c in result))
    if len(operands) > 1:
        # Values of their own: what a product reshapes is no view of the user's arrays, which may change afterwards. One
        # operand whose axes are permuted is a view, as NumPy's.
        operands = [(term, x._as_result()) for term, x in operands]
    operands = [(term, x.astype(dtype, copy=False)) for term, x in operands]
    for number in range(len(operands)):
        others = "".join(term for k, (term, _) in enumerate(operands) if k != number)
        operands[number] = _sum_over(*operands[number], {*result, *others})
    for pair in _contraction_order(operands, result):
        second, first = (operands.pop(k) for k in sorted(pair, reverse=True))
        kept = {*result, *(c for term, _ in operands for c in term)}
        operands.append(_contract(first, second, kept))
    return _transpose_to(*operands[0], result)


def _contraction_order(operands: list[_Term], result: str) -> Sequence[tuple[int, ...]]:
    """Choose the two operands to multiply at each step, by their positions among those that are left.

    The product of each step is the last of those left for the next, as `np.einsum_path` numbers them.
    """
    in_turn = [(0, 1)] * (len(operands) - 1)
    if len(operands) <= 2:
        return in_turn
    text = ",".join(term for term, _ in operands) + "->" + result
    shapes = [np.broadcast_to(np.float32(0), x.shape) for _, x in operands]
    _, *steps = np.einsum_path(text, *shapes, optimize="greedy")[0]  # after the word "einsum_path"
    if any(len(step) > 2 for step in steps):  # einsum_path contracts three or more at once where pairs save no work
        return in_turn
    return [step for step in steps if len(step) == 2]


def _contract(first: _Term, second: _Term, kept: set[str]) -> _Term:
    """Multiply two operands, and sum over the letters that are not kept."""
    (left, a), (right, b) = first, second
    summed = [c for c in left if c in right and c not in kept]
    rows, cols = [c for c in left if c not in right], [c for c in right if c not in left]
    if not (summed and rows and cols):
        letters = [*left, *cols]
        return _sum_over("".join(letters), apply("multiply", _align(left, a, letters), _align(right, b, letters)), kept)
    batch = [c for c in left if c in right and c in kept]
    sizes = dict(zip(left + right, a.shape + b.shape, strict=True))
    product = matmul(_as_matrices(first, (batch, rows, summed)), _as_matrices(second, (batch, summed, cols)))
    letters = [*batch, *rows, *cols]
    return "".join(letters), product.reshape(tuple(sizes[c] for c in letters))


def _as_matrices(operand: _Term, groups: tuple[list[str], list[str], list[str]]) -> Tracer:
    """Reshape an operand to an axis for each letter of the batch, one for all letters of rows, and one for columns."""
    term, x = operand
    sizes = dict(zip(term, x.shape, strict=True))
    batch, rows, cols = groups
    shape = (*(sizes[c] for c in batch), math.prod(sizes[c] for c in rows), math.prod(sizes[c] for c in cols))
    return _transpose_to(term, x, "".join([*batch, *rows, *cols])).reshape(shape)


def _sum_over(term: str, x: Tracer, kept: set[str]) -> _Term:
    """Sum over the letters of an operand that are not kept."""
    axes = tuple(p for p, c in enumerate(term) if c not in kept)
    return ("".join(c for c in term if c in kept), reduce("sum", x, axes)) if axes else (term, x)


def _align(term: str, x: Tracer, letters: list[str]) -> Tracer:
    """Permute axes to the order of `letters`, with axes of length one for those that the operand lacks."""
    x = _transpose_to(term, x, "".join(c for c in letters if c in term))
    return x[tuple(slice(None) if c in term else None for c in letters)] if letters else x


def _transpose_to(term: str, x: Tracer, result: str) -> Tracer:
    return x if term == result else x.transpose(tuple(term.index(c) for c in result))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.dot: _dot,
    np.inner: _inner,
    np.outer: _outer,
    np.linalg.outer: _outer_of_vectors,
    np.vdot: _vdot,
    np.tensordot: _tensordot,
    np.linalg.tensordot: lambda a, b, /, *, axes=2: _tensordot(a, b, axes),
    np.linalg.matmul: lambda a, b, /: matmul(a, b),
    np.linalg.multi_dot: _multi_dot,
    np.einsum: _einsum,
}
